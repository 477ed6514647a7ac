"""Pairs of hidden states as the bytes that cross from one stage to the next."""

from __future__ import annotations

import torch


def to_bytes(pair: torch.Tensor) -> memoryview:
    """[2, T, H] in any dtype and on any device, as bytes in host memory."""
    return pair.contiguous().view(torch.uint8).cpu().numpy().reshape(-1).data


def to_pair(data: bytearray | memoryview, rows: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors [rows, H] from such bytes, with the dtype, width and device of `like`."""
    shape = (2, rows, like.shape[1])
    if len(data) != 2 * rows * like.shape[1] * like.element_size():
        raise ValueError(f"{len(data)} bytes aren't hidden states of {rows} tokens")
    if not rows:
        empty = like.new_empty((0, like.shape[1]))
        return empty, empty
    pair = torch.frombuffer(data, dtype=like.dtype).view(shape).to(like.device)
    return pair[0], pair[1]
