"""RMSNorm, alone and fused with the residual addition before it: one program a few whole rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks
from kernels.triton.launch import launch

TILE = 1024  # elements a program takes at least: short rows (a head each, in QK-norm) share a program


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    summed,
    rows,
    x_token,
    x_head,
    residual_token,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows are (token, head) pairs. With a residual, x + residual is rounded, stored in `summed`, and normed."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    source = (row // HEADS) * x_token + (row % HEADS) * x_head
    target = row[:, None] * WIDTH + column[None, :]
    value = tl.load(x + source[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        addend = tl.load(residual + row[:, None] * residual_token + column[None, :], mask=inside, other=0.0)
        rounded = (value + addend.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(summed + target, rounded, mask=inside)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    normed = value * inverse[:, None] * scale[None, :]
    tl.store(out + target, normed.to(out.dtype.element_ty), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, summed: Tensor | None, eps: float) -> None:
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * heads
    columns = triton.next_power_of_2(width)
    rows_a_program = max(1, TILE // columns)
    launch(
        rms_norm_kernel,
        (triton.cdiv(rows, rows_a_program),),
        x,
        residual,
        weight,
        out,
        summed,
        rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        residual.stride(0) if residual is not None else 0,
        eps,
        HEADS=heads,
        WIDTH=width,
        ROWS=rows_a_program,
        COLUMNS=columns,
        num_warps=min(16, max(4, columns // 512)),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    checks.check_rms_norm("rms_norm", x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    checks.check_rms_norm("add_rms_norm", x, weight, residual)
    out, summed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, out, summed, eps)
    return out, summed
