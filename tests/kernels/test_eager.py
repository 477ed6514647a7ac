"""The eager backend against the reference, on poisoned memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Ops, eager, reference
from tests.kernels.batches import Batch, make_batch

RTOL = ATOL = 1e-5
SHAPES = st.lists(
    st.integers(1, 90).flatmap(lambda length: st.tuples(st.integers(0, min(length, 20)), st.just(length))),
    min_size=1,
    max_size=6,
)


def attend(ops: Ops, batch: Batch, window: int = 0) -> torch.Tensor:
    return ops.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.cu_seqlens_q, batch.seq_lens,
        scale=0.25, max_query_len=batch.max_query_len, window=window,
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    shapes=SHAPES, ratio=st.sampled_from([1, 3, 7]), window=st.sampled_from([0, 1, 17]), block=st.sampled_from([16, 32])
)
def test_attention_agrees(shapes: list[tuple[int, int]], ratio: int, window: int, block: int) -> None:
    batch = make_batch(shapes, heads=2 * ratio, kv_heads=2, head_dim=16, block_size=block)
    torch.testing.assert_close(
        attend(eager.OPS, batch, window), attend(reference.OPS, batch, window), rtol=RTOL, atol=ATOL
    )


def test_many_decoding_sequences_go_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_MOST_GATHERED", 1 << 14)
    batch = make_batch([(1, length) for length in range(1, 60, 7)], head_dim=16)
    torch.testing.assert_close(attend(eager.OPS, batch), attend(reference.OPS, batch), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_operations_agree(dtype: torch.dtype) -> None:
    x, residual = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype)
    weight, gate_up = torch.randn(48).to(dtype), torch.randn(5, 96).to(dtype)
    torch.testing.assert_close(eager.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    for ours, theirs in zip(
        eager.add_rms_norm(x, residual, weight, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(eager.silu_mul(gate_up), reference.silu_mul(gate_up))
