"""SiLU-mul: one program a tile of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks
from kernels.triton.launch import launch

COLUMNS = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, row_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    checks.check_silu_mul(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, COLUMNS))
    launch(silu_mul_kernel, grid, gate_up, out, gate_up.stride(0), WIDTH=width, COLUMNS=COLUMNS)
    return out
