"""Which reader a model's files take."""

from __future__ import annotations

from pathlib import Path

from data_plane.errors import ModelNotFound
from data_plane.loading.checkpoint import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file or a folder with config.json and safetensors.

    Raises ModelNotFound, ModelUnreadable or UnsupportedModel, each naming what to do.
    """
    if not path.exists():
        raise ModelNotFound(f"no model at {path}; check the path, or see `ingle model list`")
    if path.is_dir():
        from data_plane.loading.hf import HFCheckpoint

        return HFCheckpoint(path)
    from data_plane.loading.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)
