"""Storing a step's keys and values in the paged cache: one program a tile of heads of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels import checks
from kernels.triton.launch import launch

TILE = 2048  # elements a program takes at most, of keys and of values each


@triton.jit
def cache_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_token,
    k_head,
    v_token,
    v_head,
    k_cache_block,
    k_cache_head,
    k_cache_slot,
    v_cache_block,
    v_cache_head,
    v_cache_slot,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE))[:, None]
    dim = tl.arange(0, DIMS)[None, :]
    inside = (head < KV_HEADS) & (dim < HEAD_DIM)
    key = tl.load(k + token * k_token + head * k_head + dim, mask=inside)
    value = tl.load(v + token * v_token + head * v_head + dim, mask=inside)
    k_target = k_cache + block * k_cache_block + offset * k_cache_slot
    v_target = v_cache + block * v_cache_block + offset * v_cache_slot
    tl.store(k_target + head * k_cache_head + dim, key, mask=inside)
    tl.store(v_target + head * v_cache_head + dim, value, mask=inside)


def cache_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    checks.check_cache_write(k, v, k_cache, v_cache, slot_mapping)
    tokens, kv_heads, head_dim = k.shape
    dims = triton.next_power_of_2(head_dim)
    head_tile = min(triton.next_power_of_2(kv_heads), max(1, TILE // dims))
    launch(
        cache_write_kernel,
        (tokens, triton.cdiv(kv_heads, head_tile)),
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[2],
        HEAD_TILE=head_tile,
        DIMS=dims,
    )
