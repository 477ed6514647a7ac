"""Private files: written whole or not at all, readable by their owner only."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def private_folder(path: Path) -> Path:
    """`path`, made with mode 0700 if it isn't there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` with `data` in one step, mode 0600."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def create_private(path: Path, data: bytes) -> bytes:
    """Write `path` if it isn't there, and return what it then holds, whoever wrote it first."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(name, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(name)
    return path.read_bytes()
