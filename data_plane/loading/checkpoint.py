"""What a model file must offer, whichever format it is in.

Weights go by one set of names: `embed.weight`, `norm.weight`, `head.weight`, and for each layer i
`layers.{i}.{attn_norm,mlp_norm,q,k,v,o,gate,up,down,q_norm,k_norm}.{weight,bias}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from data_plane.errors import ModelUnreadable
from data_plane.models.spec import ModelSpec

Array = np.ndarray[Any, Any]
GROUP = 32


@dataclass(frozen=True)
class GroupedWeight:
    """A matrix in groups of 32 along its input: w = scale · value + offset.

    values: uint8 [out, in], below 2**bits; scale, offset: float32 [out, in / 32]; bits: 4 or 8.
    """

    values: Array
    scale: Array
    offset: Array
    bits: int

    def rows(self, order: Array) -> GroupedWeight:
        return GroupedWeight(self.values[order], self.scale[order], self.offset[order], self.bits)

    def dense(self) -> Array:
        """float32 [out, in]."""
        out, width = self.values.shape
        grouped = self.values.reshape(out, width // GROUP, GROUP).astype(np.float32)
        weights: Array = grouped * self.scale[:, :, None] + self.offset[:, :, None]
        return weights.reshape(out, width)


class Checkpoint(Protocol):
    """An open model. Tensors are read when asked for, so that a replica never holds two copies."""

    spec: ModelSpec

    def has(self, name: str) -> bool: ...

    def dense(self, name: str) -> Array:
        """The tensor in float16 where it was stored so, else in float32."""
        ...

    def grouped(self, name: str) -> GroupedWeight | None:
        """The matrix as stored, where the file's own quantization maps onto groups of 32 without loss; else None."""
        ...


def check_shape(spec: ModelSpec, name: str, shape: tuple[int, ...], where: str) -> None:
    """Raises ModelUnreadable unless a weight is as large as the model's sizes say: kernels rely on it."""
    wanted = spec.shape(name)
    if tuple(shape) != wanted:
        raise ModelUnreadable(f"{where} has shape {[*shape]} where its model's sizes make {[*wanted]}; fetch it again")


def group_to_8_bits(weight: Array) -> GroupedWeight:
    """Quantize [out, in] symmetrically to 8 bits in groups of 32 (as GGML's Q8_0 does); `in` divides by 32."""
    out, width = weight.shape
    grouped = weight.astype(np.float32).reshape(out, width // GROUP, GROUP)
    # a scale that float16 holds exactly is stored in half the room
    scale = (np.abs(grouped).max(axis=2) / 127).astype(np.float16).astype(np.float32)
    scale = np.where(np.isfinite(scale), scale, np.abs(grouped).max(axis=2) / 127)
    values = np.rint(grouped / np.maximum(scale, 1e-30)[:, :, None]).clip(-128, 127) + 128
    return GroupedWeight(values.astype(np.uint8).reshape(out, width), scale, scale * -128, 8)
