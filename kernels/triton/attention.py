"""Paged attention for prefill, decode and every mix of them in one launch.

A program takes a tile of queries of one sequence and one key/value head. The rows of its tile are (query, query head)
pairs, so that the heads which share a key/value head share its loads. The grid is an upper bound that the host knows
without asking the device; each program finds its sequence by binary search in cu_seqlens_q. The softmax runs online
(FlashAttention, arXiv:2205.14135). When few sequences decode, several programs split the keys of one tile and a second
kernel merges them (Flash-Decoding).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks
from kernels.triton.launch import launch

SEGMENTS = 16
SPLIT_MAX_QUERY = 16  # longer queries bring enough programs of their own
SPLIT_MIN_CONTEXT = 512
BUSY_PROGRAMS = 128  # about one a multiprocessor of the accelerators we serve
LONG_QUERY = 64
KEY_TILE_BYTES = 16384  # keys and values, double-buffered, then fit the smallest shared memory, 64 KiB
LONG_KEY_TILE_BYTES = 8192  # many rows hold many registers: a larger tile spills


@triton.jit
def _sequence_of(tile, cu_seqlens_q, sequences, QUERIES: tl.constexpr):
    """The sequence that owns a tile: the last one whose first tile, cu_seqlens_q[s] // QUERIES + s, is not after it."""
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["sequences", "table_stride", "window"])
def attention_kernel(
    q,
    k_cache,
    v_cache,
    out,
    log_sums,
    block_tables,
    cu_seqlens_q,
    seq_lens,
    sequences,
    table_stride,
    window,
    scale_log2,
    q_token,
    q_head,
    k_block,
    k_head,
    k_slot,
    v_block,
    v_head,
    v_slot,
    out_token,
    out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Whole: writes out [T, Hq, D]. Split: out is float32 [T, Hq, SEGMENTS, D], each segment's own softmax average, and
    log_sums [T, Hq, SEGMENTS] the base-2 logarithm of its softmax denominator."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    sequence = _sequence_of(tile, cu_seqlens_q, sequences, QUERIES)
    first_row = tl.load(cu_seqlens_q + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_row
    first_query = (tile - (first_row // QUERIES + sequence)) * QUERIES
    if first_query >= query_len:
        return

    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (row < QUERIES * GROUP) & (query < query_len)
    dim = tl.arange(0, DIMS)
    held = dim < HEAD_DIM
    token = (first_row + query).to(tl.int64)
    q_at = token[:, None] * q_token + head[:, None] * q_head + dim[None, :]
    q_tile = tl.load(q + q_at, mask=live[:, None] & held[None, :], other=0.0)

    before = tl.load(seq_lens + sequence) - query_len
    position = before + query
    start = 0
    if WINDOWED:
        start = tl.maximum(before + first_query - window + 1, 0)
    stop = before + tl.minimum(first_query + QUERIES, query_len)
    if SEGMENTS > 1:
        share = tl.cdiv(tl.cdiv(stop - start, KEYS), SEGMENTS) * KEYS
        start += segment * share
        stop = tl.minimum(start + share, stop)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    average = tl.zeros([ROWS, DIMS], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for first_key in range(start, stop, KEYS):
        key = first_key + tl.arange(0, KEYS)
        # Slots past `stop` are never loaded: a weight of zero does not silence a NaN.
        there = key < stop
        block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        offset = key % BLOCK_SIZE
        k_at = kv_head * k_head + (block * k_block + offset * k_slot)[None, :] + dim[:, None]
        k_tile = tl.load(k_cache + k_at, mask=held[:, None] & there[None, :], other=0.0)
        scores = tl.dot(q_tile, k_tile, input_precision="ieee") * scale_log2
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no peak, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        v_at = kv_head * v_head + (block * v_block + offset * v_slot)[:, None] + dim[None, :]
        v_tile = tl.load(v_cache + v_at, mask=there[:, None] & held[None, :], other=0.0)
        total = total * decay + tl.sum(weights, axis=1)
        average = average * decay[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
        peak = new_peak

    denominator = tl.where(total > 0.0, total, 1.0)
    average = average / denominator[:, None]
    if SEGMENTS > 1:
        part = (token * (KV_HEADS * GROUP) + head) * SEGMENTS + segment
        tl.store(log_sums + part, peak + tl.log2(denominator), mask=live)
        out_at = part[:, None] * HEAD_DIM + dim[None, :]
    else:
        out_at = token[:, None] * out_token + head[:, None] * out_head + dim[None, :]
    tl.store(out + out_at, average.to(out.dtype.element_ty), mask=live[:, None] & held[None, :])


@triton.jit(do_not_specialize=["sequences"])
def merge_kernel(
    parts,
    log_sums,
    out,
    cu_seqlens_q,
    sequences,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Merge the segments of one token and head, each weighted by its softmax denominator."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if token >= tl.load(cu_seqlens_q + sequences):
        return
    part = (token * HEADS + head) * SEGMENTS + tl.arange(0, SEGMENTS)
    log_sum = tl.load(log_sums + part)
    weight = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    dim = tl.arange(0, DIMS)
    held = dim < HEAD_DIM
    averages = tl.load(parts + part[:, None] * HEAD_DIM + dim[None, :], mask=held[None, :], other=0.0)
    merged = tl.sum(averages * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + token * out_token + head * out_head + dim, merged.to(out.dtype.element_ty), mask=held)


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
    tokens, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    sequences, table_width = block_tables.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if tokens == 0 or sequences == 0 or max_query_len == 0:
        return out

    group = heads // kv_heads
    long = max_query_len >= LONG_QUERY
    rows = max(64 if long else 16, triton.next_power_of_2(group))
    queries = rows // group
    dims = triton.next_power_of_2(head_dim)
    keys = min(64, max(16, (LONG_KEY_TILE_BYTES if long else KEY_TILE_BYTES) // (dims * q.element_size())))
    tiles = min(tokens // queries + sequences, sequences * triton.cdiv(max_query_len, queries))
    split = (
        max_query_len <= SPLIT_MAX_QUERY
        and table_width * block_size >= SPLIT_MIN_CONTEXT
        and tiles * kv_heads < BUSY_PROGRAMS
    )
    segments = SEGMENTS if split else 1
    target, log_sums = out, None
    if split:
        target = torch.empty((tokens, heads, segments, head_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((tokens, heads, segments), dtype=torch.float32, device=q.device)
    launch(
        attention_kernel,
        (tokens // queries + sequences, kv_heads, segments),
        q,
        k_cache,
        v_cache,
        target,
        log_sums,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        sequences,
        table_width,
        window,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        out.stride(0),
        out.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOWED=window > 0,
        SEGMENTS=segments,
        ROWS=rows,
        QUERIES=queries,
        KEYS=keys,
        DIMS=dims,
        num_stages=2,
    )
    if log_sums is not None:
        launch(
            merge_kernel,
            (tokens, heads),
            target,
            log_sums,
            out,
            cu_seqlens_q,
            sequences,
            out.stride(0),
            out.stride(1),
            HEADS=heads,
            HEAD_DIM=head_dim,
            SEGMENTS=segments,
            DIMS=dims,
        )
    return out
