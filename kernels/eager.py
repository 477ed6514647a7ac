"""The operations in torch with few, large calls: what a CPU without a C compiler runs.

Sequences that decode share one padded attention; each chunk of a prompt has one of its own. Contracts are those of
`kernels.ops`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import checks, reference
from kernels.ops import Ops

_MOST_GATHERED = 1 << 27  # bytes of keys and values copied together at a time


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    checks.check_rms_norm("rms_norm", x, weight)
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    checks.check_rms_norm("add_rms_norm", x, weight, residual)
    summed = torch.add(x, residual)
    return rms_norm(summed, weight, eps), summed


def silu_mul(gate_up: Tensor) -> Tensor:
    checks.check_silu_mul(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    checks.check_paged_attention(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, max_query_len, window, out)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts, lengths = cu_seqlens_q[:-1].long(), seq_lens.long()
    counts = cu_seqlens_q[1:].long() - starts
    single = torch.nonzero(counts == 1).squeeze(1)
    for rows in _bands(single, lengths, k_cache):
        out[starts[rows]] = _decode(q[starts[rows]], k_cache, v_cache, block_tables[rows], lengths[rows], scale, window)
    for sequence in torch.nonzero(counts > 1).squeeze(1).tolist():
        start, count, length = int(starts[sequence]), int(counts[sequence]), int(lengths[sequence])
        first = max(0, length - count - window + 1) if window else 0
        keys, values = (_pages(cache, block_tables[sequence], first, length) for cache in (k_cache, v_cache))
        at = torch.arange(length - count, length).unsqueeze(1)
        positions = torch.arange(first, length)
        seen = positions <= at
        if window:
            seen &= positions > at - window
        rows = q[start : start + count].transpose(0, 1)
        attended = F.scaled_dot_product_attention(rows, keys, values, seen, scale=scale, enable_gqa=True)
        out[start : start + count] = attended.transpose(0, 1)
    return out


def _bands(sequences: Tensor, lengths: Tensor, cache: Tensor) -> list[Tensor]:
    """Sequences of like length together, so that padding is small, in bands whose copies stay within bounds."""
    if not len(sequences):
        return []
    ordered = sequences[lengths[sequences].argsort()]
    per_token = 2 * cache.shape[1] * cache.shape[3] * cache.element_size()
    longest = int(lengths[ordered].max())
    band = max(1, _MOST_GATHERED // (longest * per_token))
    return list(torch.split(ordered, band))


def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor, scale: float, window: int
) -> Tensor:
    """One query each, q [n, Hq, D], over padded copies of the pages."""
    _, kv_heads, block_size, head_dim = k_cache.shape
    width = -(-int(lengths.max()) // block_size)
    needed = torch.arange(width) * block_size < lengths.unsqueeze(1)
    if window:
        needed &= torch.arange(1, width + 1) * block_size > lengths.unsqueeze(1) - window
    blocks = torch.where(needed, tables[:, :width], 0).long()
    positions = torch.arange(width * block_size)
    seen = positions < lengths.unsqueeze(1)
    if window:
        seen &= positions >= lengths.unsqueeze(1) - window
    keys, values = (
        cache[blocks].transpose(1, 2).reshape(len(q), kv_heads, width * block_size, head_dim)
        for cache in (k_cache, v_cache)
    )
    # a slot that nobody wrote may hold NaN, and zero times NaN is NaN
    values = values.masked_fill(~seen[:, None, :, None], 0)
    keys = keys.masked_fill(~seen[:, None, :, None], 0)
    attended = F.scaled_dot_product_attention(
        q.unsqueeze(2), keys, values, seen[:, None, None, :], scale=scale, enable_gqa=True
    )
    return attended.squeeze(2)


def _pages(cache: Tensor, table: Tensor, first: int, end: int) -> Tensor:
    """Positions first … end of one sequence, [Hk, end - first, D]."""
    _, kv_heads, block_size, head_dim = cache.shape
    first_block = first // block_size
    blocks = table[first_block : -(-end // block_size)].long()
    pages = cache[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)
    return pages[:, first - first_block * block_size : end - first_block * block_size]


OPS = Ops(
    name="eager",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    apply_rope=reference.apply_rope,
    silu_mul=silu_mul,
    cache_write=reference.cache_write,
    paged_attention=paged_attention,
)
