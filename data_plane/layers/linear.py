"""Linear layers over dense weights; several that read the same input are fused into one."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from data_plane.loading.checkpoint import Array, Checkpoint


class DenseLinear:
    """y = x · Wᵀ + b, with weight [out, in] and bias [out] in one float dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def to_tensor(array: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of its own, never a view of a mapped file."""
    return torch.from_numpy(np.array(array)).to(device, dtype)


def load_dense(
    checkpoint: Checkpoint, names: list[str], dtype: torch.dtype, device: torch.device, *, bias: bool = False
) -> DenseLinear:
    """One layer from the weights `names` stacked along the output."""

    def stacked(part: str) -> torch.Tensor:
        return torch.cat([to_tensor(checkpoint.dense(f"{name}.{part}"), dtype, device) for name in names])

    return DenseLinear(stacked("weight"), stacked("bias") if bias else None)
