"""Triton's paged attention against the reference: shapes that don't divide, among poison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.ops import Ops
from kernels.reference import OPS as REFERENCE
from tests.kernels.batches import Batch, make_batch
from tests.kernels.triton_backend import DEVICE, DTYPES, TRITON, recording

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GUARD = -7.0


def attend(ops: Ops, batch: Batch, out: Tensor | None = None, window: int = 0) -> Tensor:
    return ops.paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        scale=batch.q.shape[-1] ** -0.5,
        max_query_len=batch.max_query_len,
        window=window,
        out=out,
    )


def assert_equals_reference(batch: Batch, window: int = 0) -> None:
    """Equal in the rows of the batch, and nothing written before, after or between them."""
    rows, heads, head_dim = batch.q.shape
    wide = torch.full((rows + 4, heads + 1, head_dim + 3), GUARD, dtype=batch.q.dtype, device=DEVICE)
    out = wide[2:-2, :heads, :head_dim]
    assert attend(TRITON, batch, out, window) is out
    expected = attend(REFERENCE, batch, window=window)
    used = int(batch.cu_seqlens_q[-1])
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(out[:used], expected[:used], rtol=tolerance, atol=tolerance)
    assert (wide[:2] == GUARD).all()
    assert (wide[2 + rows :] == GUARD).all()
    assert (wide[:, heads:] == GUARD).all()
    assert (wide[..., head_dim:] == GUARD).all()


def kernels_launched(batch: Batch) -> list[str]:
    with recording() as launches:
        attend(TRITON, batch)
    return [launch.kernel.__name__ for launch in launches]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (7, 1), (16, 1)])
def test_a_mixed_step(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    shapes = [(1, 33), (0, 20), (1, 1), (23, 40), (0, 0), (9, 9)]
    assert_equals_reference(
        make_batch(shapes, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=DEVICE)
    )


@pytest.mark.parametrize("window", [0, 1, 6, 100])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(
    "shapes", [[(1, 700), (0, 5)], [(1, 17), (5, 530)], [(130, 130), (1, 90)], [(70, 200), (64, 65)]]
)
def test_windows_over_split_whole_and_long_tiles(shapes: list[tuple[int, int]], block_size: int, window: int) -> None:
    assert_equals_reference(make_batch(shapes, block_size=block_size, device=DEVICE), window)


@pytest.mark.parametrize("head_dim", [80, 96, 128])
def test_split_keys_of_padded_heads(head_dim: int) -> None:
    assert_equals_reference(make_batch([(3, 600), (1, 30)], heads=6, head_dim=head_dim, device=DEVICE))


def test_a_row_that_sees_nothing_of_a_tile() -> None:
    last_segment_hides_from_early_queries = make_batch([(5, 514)], device=DEVICE)
    assert_equals_reference(last_segment_hides_from_early_queries)
    windows_start_tiles_apart = make_batch([(130, 130)], heads=2, kv_heads=2, head_dim=128, device=DEVICE)
    assert_equals_reference(windows_start_tiles_apart, window=6)


def test_a_batch_padded_past_its_last_sequence() -> None:
    assert_equals_reference(make_batch([(1, 30), (4, 31)], padding=45, device=DEVICE))
    assert_equals_reference(make_batch([(1, 600)], padding=7, device=DEVICE))


def test_a_split_step_leaves_the_padding_rows_alone() -> None:
    batch = make_batch([(1, 600)], padding=7, device=DEVICE)
    out = torch.full_like(batch.q, GUARD)
    attend(TRITON, batch, out)
    assert (out[1:] == GUARD).all()


def test_one_head_group_wider_than_a_small_tile() -> None:
    assert_equals_reference(make_batch([(3, 20), (1, 5)], heads=40, kv_heads=2, device=DEVICE))


def test_large_scores_do_not_overflow() -> None:
    batch = make_batch([(4, 50), (1, 600)], dtype=torch.float16, device=DEVICE)
    batch.q.mul_(100)
    assert_equals_reference(batch)


def test_blocks_that_left_the_window_are_not_read() -> None:
    batch = make_batch([(2, 100)], device=DEVICE)
    batch.block_tables[0, : (100 - 2 - 19) // 16] = 2**30
    assert_equals_reference(batch, window=20)


@pytest.mark.parametrize("shapes", [[], [(0, 9), (0, 0)]])
def test_a_step_without_queries(shapes: list[tuple[int, int]]) -> None:
    batch = make_batch(shapes, device=DEVICE)
    assert attend(TRITON, batch).shape == (0, 4, 64)
    assert kernels_launched(batch) == []


@pytest.mark.parametrize(
    ("shapes", "split"),
    [
        ([(1, 600)], True),
        ([(5, 600), (1, 20)], True),
        ([(1, 200)], False),  # too little context to share out
        ([(17, 600)], False),
        ([(1, 600)] * 64, False),  # the sequences fill the accelerator by themselves
    ],
)
def test_keys_are_split_when_few_short_queries_meet_a_long_context(shapes: list[tuple[int, int]], split: bool) -> None:
    expected = ["attention_kernel", "merge_kernel"] if split else ["attention_kernel"]
    assert kernels_launched(make_batch(shapes, device=DEVICE)) == expected


@st.composite
def steps(draw: st.DrawFn) -> tuple[Batch, int]:
    query_lens = st.one_of(st.just(1), st.integers(0, 40))
    contexts = st.one_of(st.integers(0, 90), st.integers(500, 560))
    lengths = draw(st.lists(st.tuples(query_lens, contexts), max_size=4))
    shapes = [(query_len, query_len + context) for query_len, context in lengths]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 16))
    options: dict[str, Any] = {
        "head_dim": draw(st.sampled_from([64, 80, 96, 128])),
        "block_size": draw(st.sampled_from([16, 32])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "padding": draw(st.integers(0, 5)),
        "seed": draw(st.integers(0, 2**31)),
    }
    return make_batch(shapes, heads=kv_heads * group, kv_heads=kv_heads, device=DEVICE, **options), draw(
        st.integers(0, 60)
    )


@settings(max_examples=20, deadline=None)
@given(steps())
def test_any_step(step: tuple[Batch, int]) -> None:
    batch, window = step
    assert_equals_reference(batch, window)
