"""Rotary position embedding in place: one program a tile of heads of one token, query tiles before key tiles."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels import checks
from kernels.triton.launch import launch

TILE = 1024  # pairs a program takes at most


@triton.jit
def _rotate(
    token, head_stride, first_head, cos, sin, pair, HEADS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr
):
    head = first_head + tl.arange(0, TILE)
    inside = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    at = token + head[:, None] * head_stride + pair[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = token.dtype.element_ty
    tl.store(at, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(at + HALF, (high * cos + low * sin).to(dtype), mask=inside)


@triton.jit
def rope_kernel(
    q,
    k,
    cos_sin,
    positions,
    q_token,
    q_head,
    k_token,
    k_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)[None, :]
    q_tiles = tl.cdiv(HEADS, HEAD_TILE)
    if tile < q_tiles:
        _rotate(q + token * q_token, q_head, tile * HEAD_TILE, cos, sin, pair, HEADS, HALF, HEAD_TILE)
    else:
        _rotate(k + token * k_token, k_head, (tile - q_tiles) * HEAD_TILE, cos, sin, pair, KV_HEADS, HALF, HEAD_TILE)


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    checks.check_apply_rope(q, k, cos_sin, positions)
    tokens, heads, _ = q.shape
    kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    pairs = triton.next_power_of_2(half)
    head_tile = min(triton.next_power_of_2(max(heads, kv_heads)), max(1, TILE // pairs))
    launch(
        rope_kernel,
        (tokens, triton.cdiv(heads, head_tile) + triton.cdiv(kv_heads, head_tile)),
        q,
        k,
        cos_sin,
        positions,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        PAIRS=pairs,
        HEAD_TILE=head_tile,
    )
