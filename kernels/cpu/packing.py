"""Matrices in groups of 32 inputs, laid out as the C code reads them (see gemm.h)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.errors import InvalidInput

GROUP = 32
LANES = 16


@dataclass(frozen=True)
class PackedMatrix:
    """w = scale · value + offset. values: uint8, flat; scales: [tiles, groups, 2, 16] in float16 or float32."""

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    inputs: int
    bits: int

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def pack(
    values: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, bits: int, bias: torch.Tensor | None = None
) -> PackedMatrix:
    """values: uint8 [out, in] below 2**bits; scale, offset: float32 [out, in / 32]; bits 4 or 8; bias: [out].

    Scales are kept in float16 where that loses nothing. Raises InvalidInput where `in` is no multiple of 32.
    """
    outputs, inputs = values.shape
    if inputs % GROUP or bits not in (4, 8):
        raise InvalidInput(f"a {outputs} x {inputs} matrix of {bits} bits cannot be packed in groups of {GROUP}")
    groups, tiles = inputs // GROUP, -(-outputs // LANES)
    missing = tiles * LANES - outputs
    if missing:
        values = torch.nn.functional.pad(values, (0, 0, 0, missing))
        scale = torch.nn.functional.pad(scale, (0, 0, 0, missing))
        offset = torch.nn.functional.pad(offset, (0, 0, 0, missing))
    runs = values.view(tiles, LANES, groups, 8, 4).permute(0, 2, 3, 1, 4)
    packed = runs[:, :, :4] | (runs[:, :, 4:] << 4) if bits == 4 else runs
    both = torch.stack([scale, offset]).view(2, tiles, LANES, groups).permute(1, 3, 0, 2)
    halves = both.to(torch.float16)
    if not torch.equal(halves.float(), both):
        halves = both.float()
    return PackedMatrix(
        packed.contiguous().view(-1),
        halves.contiguous(),
        None if bias is None else bias.float().contiguous(),
        outputs,
        inputs,
        bits,
    )
