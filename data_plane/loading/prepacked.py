"""Packed weights kept in the cache and mapped at the next start: nothing is read twice, and replicas share the pages.

An entry is a folder of `weights.bin` (arrays, each on a 64-byte border) and `index.json`, named by what it was made of.
The cache is `$INGLE_CACHE/packed`; past MOST_BYTES the entries that were longest unused go.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from data_plane import log
from data_plane.models.spec import ModelSpec

Array = np.ndarray[Any, Any]
VERSION = 1
MOST_BYTES = 40 << 30
_BORDER = 64


def entry_for(model: Path, spec: ModelSpec) -> Path:
    """Where the packed form of a model file or folder belongs; another file, size, time or shape is another place."""
    root = os.environ.get("INGLE_CACHE")
    cache = (Path(root) if root else Path.home() / ".cache" / "ingle") / "packed"
    digest = hashlib.sha256(f"{VERSION} {spec}".encode())
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    for file in files:
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return cache / digest.hexdigest()[:24]


def read(entry: Path) -> dict[str, Array] | None:
    """The arrays of an entry, as read-only views of the mapped file; None where there is no whole entry."""
    try:
        index: dict[str, Any] = json.loads((entry / "index.json").read_text("utf-8"))
        with (entry / "weights.bin").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        os.utime(entry)
        return {
            name: np.frombuffer(mapped, np.dtype(kind), int(np.prod(shape, dtype=np.int64)), offset).reshape(shape)
            for name, (kind, shape, offset) in index.items()
        }
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(entry: Path, arrays: dict[str, Array]) -> bool:
    """Keep the arrays. False, with a log line, where the cache cannot be written: the model runs without."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent) as scratch:
            part = Path(scratch) / "entry"
            part.mkdir()
            index: dict[str, tuple[str, list[int], int]] = {}
            with (part / "weights.bin").open("wb") as out:
                for name, array in arrays.items():
                    out.write(b"\0" * (-out.tell() % _BORDER))
                    index[name] = (array.dtype.str, list(array.shape), out.tell())
                    out.write(np.ascontiguousarray(array).data)
            (part / "index.json").write_text(json.dumps(index), "utf-8")
            shutil.rmtree(entry, ignore_errors=True)
            part.replace(entry)
        _trim(entry)
    except OSError as error:
        log.event("packed_cache_unwritable", level="warning", reason=error.strerror or type(error).__name__)
        return entry.exists()
    return True


def _trim(kept: Path) -> None:
    """Drop the entries that were longest unused until the rest fits."""
    entries = sorted((path for path in kept.parent.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    total = sum(file.stat().st_size for path in entries for file in path.glob("*"))
    for path in entries:
        if total <= MOST_BYTES:
            return
        if path != kept:
            total -= sum(file.stat().st_size for file in path.glob("*"))
            shutil.rmtree(path, ignore_errors=True)
