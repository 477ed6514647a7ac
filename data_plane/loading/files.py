"""Reading a model folder's JSON, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_plane.errors import ModelUnreadable


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelUnreadable if it is missing, broken or no object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelUnreadable(f"cannot read {path}: {(error.strerror or 'error').lower()}") from error
    except ValueError as error:
        raise ModelUnreadable(f"{path} is not JSON; fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelUnreadable(f"{path} does not hold an object; fetch the model again")
    return value


def is_encoder(path: Path) -> bool:
    """Whether a model folder holds a BERT encoder."""
    config = path / "config.json"
    return path.is_dir() and config.exists() and (read_json(config).get("architectures") or [None])[0] == "BertModel"
