"""Linear layers over dense weights; several that read the same input are fused into one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from data_plane.loading.checkpoint import Checkpoint


class DenseLinear:
    """y = x · Wᵀ + b, with weight [out, in] and bias [out] in one float dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def load_dense(
    checkpoint: Checkpoint, names: list[str], dtype: torch.dtype, device: torch.device, *, bias: bool = False
) -> DenseLinear:
    """One layer from the weights `names` stacked along the output."""
    weight = torch.cat([checkpoint.dense(f"{name}.weight").to(dtype) for name in names]).to(device)
    offset = torch.cat([checkpoint.dense(f"{name}.bias").to(dtype) for name in names]).to(device) if bias else None
    return DenseLinear(weight, offset)
