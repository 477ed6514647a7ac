"""The table of cosines and sines that rotary embedding reads, with the known ways to stretch it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from data_plane.models.spec import RopeSpec

Array = np.ndarray[Any, Any]
_PART = 1 << 14


def cos_sin_table(rope: RopeSpec, positions: int) -> Array:
    """float32 [positions, rotary_dim]: cosines, then sines."""
    frequencies, amplitude = inverse_frequencies(rope)
    table = np.empty((positions, rope.rotary_dim), np.float32)
    # by parts: float64 for a context of a million tokens is gigabytes
    for start in range(0, positions, _PART):
        angles = np.arange(start, min(start + _PART, positions), dtype=np.float64)[:, None] * frequencies
        table[start : start + _PART] = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * amplitude
    return table


def inverse_frequencies(rope: RopeSpec) -> tuple[Array, float]:
    """float64 [rotary_dim / 2] radians a position, and the factor on cosines and sines (YaRN's attention factor)."""
    half = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    frequencies = rope.theta**-half
    if rope.frequency_divisors:
        return frequencies / np.asarray(rope.frequency_divisors, dtype=np.float64), 1.0
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, frequencies), _yarn_amplitude(rope)
    return frequencies, 1.0


def _llama3(rope: RopeSpec, frequencies: Array) -> Array:
    """Slow frequencies are stretched, fast ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_len * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clip(0, 1)
    blended: Array = frequencies * kept + frequencies / rope.factor * (1 - kept)
    return blended


def _yarn(rope: RopeSpec, frequencies: Array) -> Array:
    """YaRN (arXiv:2309.00071): interpolate dimensions that turn fewer than beta_slow times over the original length."""

    def dimension_at(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_at(rope.beta_fast), dimension_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (np.arange(rope.rotary_dim // 2, dtype=np.float64) - low) / max(high - low, 1e-3)
    stretched = ramp.clip(0, 1)
    blended: Array = frequencies / rope.factor * stretched + frequencies * (1 - stretched)
    return blended


def _yarn_amplitude(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
