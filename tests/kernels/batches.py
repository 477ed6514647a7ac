"""Batches for the attention tests: dense sequences, and the paged cache that holds them among poison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

POISON = float("nan")


@dataclass(frozen=True)
class Batch:
    """A mixed step, and the dense keys and values [seq_len, Hk, D] of each sequence that it was made from."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    max_query_len: int
    keys: list[Tensor]
    values: list[Tensor]


def make_batch(
    shapes: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padding: int = 0,
    seed: int = 0,
) -> Batch:
    """A step of sequences given as (query_len, seq_len), with `padding` query rows past the last one.

    Every slot that holds no key is NaN, blocks lie shuffled, unused blocks are all NaN, and table entries past a
    sequence's blocks point far outside the cache. q is a strided view of a fused projection.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    counts = [-(-seq_len // block_size) for _, seq_len in shapes]
    blocks = sum(counts) + 3
    order = torch.randperm(blocks, generator=generator).tolist()
    k_cache = torch.full((blocks, kv_heads, block_size, head_dim), POISON, dtype=dtype)
    v_cache = torch.full_like(k_cache, POISON)
    block_tables = torch.full((len(shapes), max(counts, default=0) + 2), 2**30, dtype=torch.int32)
    keys, values = [], []
    for sequence, ((_, seq_len), count) in enumerate(zip(shapes, counts, strict=True)):
        mine = [order.pop() for _ in range(count)]
        block_tables[sequence, :count] = torch.tensor(mine, dtype=torch.int32)
        keys.append(noise(seq_len, kv_heads, head_dim))
        values.append(noise(seq_len, kv_heads, head_dim))
        positions = torch.arange(seq_len)
        at = torch.tensor(mine, dtype=torch.int64)[positions // block_size], positions % block_size
        k_cache[at[0], :, at[1]] = keys[-1]
        v_cache[at[0], :, at[1]] = values[-1]
    query_lens = torch.tensor([query_len for query_len, _ in shapes], dtype=torch.int32)
    cu_seqlens_q = torch.zeros(len(shapes) + 1, dtype=torch.int32)
    cu_seqlens_q[1:] = query_lens.cumsum(0)
    rows = int(query_lens.sum()) + padding
    fused = noise(rows, heads + 2 * kv_heads, head_dim)
    return Batch(
        q=fused.to(device)[:, :heads],
        k_cache=k_cache.to(device),
        v_cache=v_cache.to(device),
        block_tables=block_tables.to(device),
        cu_seqlens_q=cu_seqlens_q.to(device),
        seq_lens=torch.tensor([seq_len for _, seq_len in shapes], dtype=torch.int32, device=device),
        max_query_len=int(query_lens.max()) if shapes else 0,
        keys=keys,
        values=values,
    )
