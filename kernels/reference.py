"""Every operation in plain torch, obviously right: the truth that the other backends are tested against.

The signatures and what they mean are in `kernels.ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import checks
from kernels.ops import Ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    checks.check_rms_norm("rms_norm", x, weight)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype, memory_format=torch.contiguous_format)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    checks.check_rms_norm("add_rms_norm", x, weight, residual)
    summed = (x.float() + residual.float()).to(x.dtype, memory_format=torch.contiguous_format)
    return rms_norm(summed, weight, eps), summed


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    checks.check_apply_rope(q, k, cos_sin, positions)
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for heads in (q, k):
        low, high = heads[..., :half].float(), heads[..., half : 2 * half].float()
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
        heads[..., : 2 * half] = turned.to(heads.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    checks.check_silu_mul(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def cache_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    checks.check_cache_write(k, v, k_cache, v_cache, slot_mapping)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = k[kept]
    v_cache[blocks, :, offsets] = v[kept]


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
    bounds = cu_seqlens_q.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[sequence], bounds[sequence + 1]
        if start == end:
            continue
        first_query = seq_len - (end - start)
        first_key = max(0, first_query - window + 1) if window else 0
        keys = _gather(k_cache, block_tables[sequence], first_key, seq_len)
        values = _gather(v_cache, block_tables[sequence], first_key, seq_len)
        out[start:end] = _attend(q[start:end], keys, values, first_query, first_key, scale, window).to(q.dtype)
    return out


def _gather(cache: Tensor, block_table: Tensor, first: int, end: int) -> Tensor:
    """Positions first … end of one sequence, [Hk, end - first, D] float32. Blocks outside them are not read."""
    _, kv_heads, block_size, head_dim = cache.shape
    first_block = first // block_size
    blocks = block_table[first_block : -(-end // block_size)].long()
    pages = cache[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)
    skip = first_block * block_size
    return pages[:, first - skip : end - skip].float()


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, first_query: int, first_key: int, scale: float, window: int
) -> Tensor:
    """Dense causal attention of q [n, Hq, D] over keys and values [Hk, m, D]; [n, Hq, D] float32."""
    kv_heads, length, head_dim = keys.shape
    queries, heads, _ = q.shape
    rows = q.float().transpose(0, 1).reshape(kv_heads, heads // kv_heads, queries, head_dim)
    scores = rows @ keys.unsqueeze(1).transpose(-1, -2) * scale
    query_positions = torch.arange(first_query, first_query + queries, device=q.device).unsqueeze(1)
    key_positions = torch.arange(first_key, first_key + length, device=q.device)
    seen = key_positions <= query_positions
    if window:
        seen &= key_positions > query_positions - window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return (weights @ values.unsqueeze(1)).reshape(heads, queries, head_dim).transpose(0, 1)


OPS = Ops(
    name="reference",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    apply_rope=apply_rope,
    silu_mul=silu_mul,
    cache_write=cache_write,
    paged_attention=paged_attention,
)
