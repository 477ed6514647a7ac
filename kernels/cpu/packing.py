"""Matrices in groups of 32 inputs, laid out as the C code reads them (see gemm.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.errors import InvalidInput

Array = np.ndarray[Any, Any]
GROUP = 32
LANES = 16


@dataclass(frozen=True)
class PackedMatrix:
    """w = scale · value + offset. values: uint8, flat; scales: [tiles, groups, 2, 16] in float16 or float32."""

    values: Array
    scales: Array
    bias: Array | None
    outputs: int
    inputs: int
    bits: int

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def pack(values: Array, scale: Array, offset: Array, bits: int, bias: Array | None = None) -> PackedMatrix:
    """values: uint8 [out, in] below 2**bits; scale, offset: float32 [out, in / 32]; bits 4 or 8; bias: [out].

    Scales are kept in float16 where that loses nothing. Raises InvalidInput where `in` is no multiple of 32.
    """
    outputs, inputs = values.shape
    if inputs % GROUP or bits not in (4, 8):
        raise InvalidInput(f"a {outputs} x {inputs} matrix of {bits} bits cannot be packed in groups of {GROUP}")
    groups, tiles = inputs // GROUP, -(-outputs // LANES)
    missing = tiles * LANES - outputs
    if missing:
        values, scale, offset = (np.pad(part, ((0, missing), (0, 0))) for part in (values, scale, offset))
    if bits == 4:
        halves = values.reshape(tiles * LANES, groups, 2, 16)
        values = halves[:, :, 0] | halves[:, :, 1] << 4
    # four inputs are one 32-bit word: moving words is quicker than moving bytes
    words = np.ascontiguousarray(values).reshape(tiles * LANES, -1).view(np.uint32)
    runs = words.reshape(tiles, LANES, groups, bits).transpose(0, 2, 3, 1)
    both = np.stack([scale, offset]).reshape(2, tiles, LANES, groups).transpose(1, 3, 0, 2)
    with np.errstate(over="ignore"):
        short = both.astype(np.float16)
    exact = np.array_equal(short.astype(np.float32), both)
    return PackedMatrix(
        np.ascontiguousarray(runs).view(np.uint8).reshape(-1),
        np.ascontiguousarray(short if exact else both.astype(np.float32)),
        None if bias is None else np.ascontiguousarray(bias, np.float32),
        outputs,
        inputs,
        bits,
    )
