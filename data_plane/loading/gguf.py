"""A GGUF reader that trusts nothing: every count, length and extent is checked against the file before use.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_plane.errors import ModelUnreadable
from data_plane.loading.gguf_blocks import BLOCKS, dequantize
from data_plane.loading.settings import Settings

_SCALARS: dict[int, tuple[str, int]] = {
    0: ("<B", 1), 1: ("<b", 1), 2: ("<H", 2), 3: ("<h", 2), 4: ("<I", 4), 5: ("<i", 4),
    6: ("<f", 4), 7: ("<?", 1), 10: ("<Q", 8), 11: ("<q", 8), 12: ("<d", 8),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_NUMPY: dict[int, str] = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_MOST_ENTRIES = 1 << 20


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: `shape` outermost first, `kind` a GGML type, `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file: `fields` (metadata) and `tensors`, whose bytes stay mapped and are read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelUnreadable(
                f"cannot read {path}: {_reason(error)}; check the path and its permissions"
            ) from error
        try:
            self.fields, self.tensors = self._parse()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise self._bad(f"it ends or breaks at byte {self._at} of {len(self._map)}") from error

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor in float32, shape as declared."""
        info = self.tensors[name]
        return dequantize(self.raw(name), info.kind, info.shape)

    def raw(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor's bytes as stored, uint8 [nbytes], a view of the mapped file."""
        info = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)

    def _bad(self, what: str) -> ModelUnreadable:
        return ModelUnreadable(f"{self.path} is not a whole GGUF file: {what}; fetch it again")

    def _parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._map[:4] != b"GGUF":
            raise self._bad("it does not start with GGUF")
        self._at = 4
        version = self._scalar(4)
        if version not in (2, 3):
            raise self._bad(f"version {version} is not 2 or 3")
        tensor_count, field_count = self._scalar(10), self._scalar(10)
        if tensor_count > _MOST_ENTRIES or field_count > _MOST_ENTRIES:
            raise self._bad(f"it claims {tensor_count} tensors and {field_count} fields")
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            key = self._string()
            fields[key] = self._value(self._scalar(4))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = Settings(fields, str(self.path)).integer("general.alignment", 32, low=1, high=1 << 20)
        if alignment & (alignment - 1):
            raise self._bad(f"alignment {alignment} is not a power of two")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in infos:
            if kind not in BLOCKS:
                raise ModelUnreadable(
                    f"{self.path}: tensor {name} has GGML type {kind}, which is not supported; convert the model to "
                    "Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, F16 or BF16"
                )
            per_block, block_bytes = BLOCKS[kind]
            count = 1
            for size in shape:
                count *= size
            if not shape or shape[-1] % per_block:
                raise self._bad(f"tensor {name} of shape {shape} does not fill whole blocks of {per_block}")
            nbytes = count // per_block * block_bytes
            if base + offset + nbytes > len(self._map):
                raise self._bad(f"tensor {name} ends at byte {base + offset + nbytes} of {len(self._map)}")
            tensors[name] = GGUFTensor(name, shape, kind, base + offset, nbytes)
        return fields, tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar(4)
        if dimensions > 8:
            raise self._bad(f"tensor {name} claims {dimensions} dimensions")
        shape = tuple(self._scalar(10) for _ in range(dimensions))[::-1]
        return name, shape, self._scalar(4), self._scalar(10)

    def _scalar(self, kind: int) -> Any:
        form, size = _SCALARS[kind]
        (value,) = struct.unpack_from(form, self._map, self._at)
        self._at += size
        return value

    def _string(self) -> str:
        length = self._scalar(10)
        start = self._at
        if length > len(self._map) - start:
            raise self._bad(f"a string at byte {start} claims {length} bytes")
        self._at = start + length
        return self._map[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise self._bad(f"field type {kind} at byte {self._at} is unknown")
            return self._scalar(kind)
        item, count = self._scalar(4), self._scalar(10)
        if count > len(self._map):
            raise self._bad(f"an array at byte {self._at} claims {count} items")
        if item == _STRING:
            return self._strings(count)
        if item not in _NUMPY:
            raise self._bad(f"array type {item} at byte {self._at} is unknown")
        if count == 0:
            return []
        values = np.frombuffer(self._map, np.dtype(_NUMPY[item]), count, self._checked(count * _SCALARS[item][1]))
        return values.tolist()

    def _checked(self, size: int) -> int:
        start = self._at
        if size > len(self._map) - start:
            raise self._bad(f"an array at byte {start} claims {size} bytes")
        self._at = start + size
        return start

    def _strings(self, count: int) -> list[str]:
        # vocabularies are long: this loop is most of the time to open a file
        whole, at, end = self._map, self._at, len(self._map)
        out: list[str] = []
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = unpack(whole, at)
            at += 8
            if length > end - at:
                self._at = at
                raise self._bad(f"a string at byte {at} claims {length} bytes")
            out.append(whole[at : at + length].decode("utf-8", "replace"))
            at += length
        self._at = at
        return out


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "it is empty" if isinstance(error, ValueError) else str(error)
