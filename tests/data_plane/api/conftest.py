from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data_plane import tiny
from tests.data_plane.replica import Replica, running
from tests.data_plane.text.tokenizers_made import byte_level_fields


@pytest.fixture(scope="package")
def demo(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A replica of the demo model, as it runs by default but for its memory."""
    log = tmp_path_factory.mktemp("demo") / "log"
    flags = ("--name", "demo", "--max-model-len", "2048", "--kv-cache-tokens", "16384")
    with running(demo_path, log, *flags) as replica:
        yield replica
    assert not [event for event in replica.logged() if event["level"] == "error"]


@pytest.fixture(scope="package")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that starts at once, talks nonsense fast, and can go on for long."""
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    model = tiny.make("llama", max_position_embeddings=1 << 16)
    tiny.write_gguf(model, path, **byte_level_fields(tiny.VOCABULARY))
    return path


@pytest.fixture(scope="package")
def small(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A replica of the tiny model."""
    with running(tiny_path, tmp_path_factory.mktemp("small") / "log", "--name", "tiny") as replica:
        yield replica
    assert not [event for event in replica.logged() if event["level"] == "error"]
