"""GGML block formats: how many values a block holds, its bytes, and how to turn blocks into float32.

Layouts follow ggml's `ggml-common.h`; they are checked in the tests against the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 0, 1, 2, 3, 6, 7, 8
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, BF16 = 10, 11, 12, 13, 14, 30

# GGML type -> (values a block, bytes a block)
BLOCKS: dict[int, tuple[int, int]] = {
    F32: (1, 4), F16: (1, 2), BF16: (1, 2),
    Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22), Q5_1: (32, 24), Q8_0: (32, 34),
    Q2_K: (256, 84), Q3_K: (256, 110), Q4_K: (256, 144), Q5_K: (256, 176), Q6_K: (256, 210),
}  # fmt: skip


def dequantize(raw: Array, kind: int, shape: tuple[int, ...]) -> Array:
    """float32 array of `shape` from `raw`, uint8 [nbytes]."""
    if kind == F32:
        return raw.view("<f4").reshape(shape).astype(np.float32)
    if kind == F16:
        return raw.view("<f2").reshape(shape).astype(np.float32)
    if kind == BF16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return _DECODERS[kind](raw.reshape(-1, BLOCKS[kind][1])).reshape(shape)


def _half(blocks: Array, at: int) -> Array:
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def nibbles(packed: Array) -> Array:
    """[n, 16] bytes -> [n, 32] values: low nibbles are the first half, high nibbles the second."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _q4_0(b: Array) -> Array:
    return _half(b, 0) * (nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Array) -> Array:
    return _half(b, 0) * nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _fifth_bits(packed: Array) -> Array:
    """uint8 [n, 4] -> [n, 32] of 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q5_0(b: Array) -> Array:
    values = nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])
    return _half(b, 0) * (values.astype(np.float32) - 16)


def _q5_1(b: Array) -> Array:
    values = nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])
    return _half(b, 0) * values.astype(np.float32) + _half(b, 2)


def _q8_0(b: Array) -> Array:
    return _half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def k_scales(packed: Array) -> tuple[Array, Array]:
    """The 6-bit scales and minima of Q4_K and Q5_K: uint8 [n, 12] -> two of uint8 [n, 8]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales, minima


def _paired_nibbles(packed: Array) -> Array:
    """[n, 128] -> [n, 8, 32]: each 32 bytes hold a low-nibble group, then a high-nibble group."""
    quarters = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(-1, 8, 32)


def q4_k_parts(b: Array) -> tuple[Array, Array, Array]:
    """Q4_K as groups of 32: values uint8 [n, 8, 32], scale and offset float32 [n, 8] (w = scale·v + offset)."""
    scales, minima = k_scales(b[:, 4:16])
    return _paired_nibbles(b[:, 16:]), _half(b, 0) * scales, -_half(b, 2) * minima


def _q4_k(b: Array) -> Array:
    values, scale, offset = q4_k_parts(b)
    weights: Array = scale[:, :, None] * values.astype(np.float32) + offset[:, :, None]
    return weights


def _q5_k(b: Array) -> Array:
    scales, minima = k_scales(b[:, 4:16])
    high = b[:, 16:48]
    fifth = np.stack([(high >> bit) & 1 for bit in range(8)], axis=1)
    values = (_paired_nibbles(b[:, 48:]) | (fifth << 4)).astype(np.float32)
    weights: Array = (_half(b, 0) * scales)[:, :, None] * values - (_half(b, 2) * minima)[:, :, None]
    return weights


def _q6_k(b: Array) -> Array:
    low, high = b[:, :128].reshape(-1, 2, 64), b[:, 128:192].reshape(-1, 2, 32)
    scales = b[:, 192:208].view(np.int8).astype(np.float32)
    fours = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    twos = np.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2)
    values = (fours | (twos << 4)).astype(np.float32) - 32
    weights: Array = (_half(b, 208) * scales)[:, :, None] * values.reshape(-1, 16, 16)
    return weights


def _q2_k(b: Array) -> Array:
    scales, packed = b[:, :16], b[:, 16:80].reshape(-1, 2, 32)
    values = np.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 16, 16)
    scale = _half(b, 80) * (scales & 15).astype(np.float32)
    offset = _half(b, 82) * (scales >> 4).astype(np.float32)
    weights: Array = scale[:, :, None] * values.astype(np.float32) - offset[:, :, None]
    return weights


def _q3_k(b: Array) -> Array:
    mask, packed, s = b[:, :32], b[:, 32:96].reshape(-1, 2, 32), b[:, 96:108]
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1)
    top = np.concatenate([(s[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scale = (low | (top << 4)).astype(np.float32) - 32
    twos = np.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 8, 32)
    high = np.stack([(mask >> bit) & 1 for bit in range(8)], axis=1)
    values = (twos.astype(np.float32) - np.where(high == 0, 4, 0)).reshape(-1, 16, 16)
    weights: Array = (_half(b, 108) * scale)[:, :, None] * values
    return weights


_DECODERS: dict[int, Callable[[Array], Array]] = {
    Q4_0: _q4_0, Q4_1: _q4_1, Q5_0: _q5_0, Q5_1: _q5_1, Q8_0: _q8_0,
    Q2_K: _q2_k, Q3_K: _q3_k, Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k,
}  # fmt: skip
