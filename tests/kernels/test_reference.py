"""The reference against torch's own operators, and its contract on poisoned memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import InvalidInput
from kernels.reference import OPS
from tests.kernels.batches import Batch, make_batch


def dense_attention(batch: Batch, scale: float, window: int = 0) -> Tensor:
    """The same step by scaled_dot_product_attention on each dense sequence, [sum of query_len, Hq, D]."""
    outputs = []
    bounds = batch.cu_seqlens_q.tolist()
    for start, end, keys, values in zip(bounds, bounds[1:], batch.keys, batch.values, strict=False):
        length, group = keys.shape[0], batch.q.shape[1] // keys.shape[1]
        at = torch.arange(length - (end - start), length).unsqueeze(1)
        seen = torch.arange(length) <= at
        if window:
            seen &= torch.arange(length) > at - window
        q, k, v = (x.transpose(0, 1) for x in (batch.q[start:end], keys, values))
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(outputs)


def attend(batch: Batch, scale: float = 0.125, window: int = 0, out: Tensor | None = None) -> Tensor:
    return OPS.paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        scale=scale,
        max_query_len=batch.max_query_len,
        window=window,
        out=out,
    )


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize("block_size", [16, 32])
def test_attention_equals_dense_attention(heads: int, kv_heads: int, block_size: int, window: int) -> None:
    shapes = [(1, 1), (1, 37), (0, 20), (33, 33), (5, 64), (16, 50)]
    batch = make_batch(shapes, heads=heads, kv_heads=kv_heads, head_dim=80, block_size=block_size)
    torch.testing.assert_close(attend(batch, 0.3, window), dense_attention(batch, 0.3, window), rtol=1e-5, atol=1e-5)


def test_attention_does_not_need_blocks_that_left_the_window() -> None:
    batch = make_batch([(2, 100)], block_size=16)
    expected = attend(batch, window=20)
    batch.block_tables[0, : (100 - 2 - 19) // 16] = 2**30
    torch.testing.assert_close(attend(batch, window=20), expected)


def test_attention_writes_where_it_is_told_and_nowhere_else() -> None:
    batch = make_batch([(3, 9), (1, 4)], padding=2)
    wide = torch.full((8, 4, 128), -7.0)
    out = wide[1:7, :, :64]
    assert attend(batch, out=out) is out
    torch.testing.assert_close(out[:4], dense_attention(batch, 0.125), rtol=1e-5, atol=1e-5)
    assert (wide[[0, 7]] == -7.0).all()
    assert (wide[..., 64:] == -7.0).all()


def test_rms_norm_equals_torch() -> None:
    x, weight = torch.randn(5, 3, 80)[:, 1:], torch.randn(80)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5), F.rms_norm(x, (80,), weight, 1e-5))


def test_rms_norm_of_half_precision_does_not_overflow() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    torch.testing.assert_close(OPS.rms_norm(x, torch.ones(8), 1e-6), torch.ones(1, 8, dtype=torch.float16))


def test_add_rms_norm_norms_the_rounded_sum() -> None:
    x, residual = torch.randn(4, 64, dtype=torch.float16), torch.randn(4, 64, dtype=torch.float16) * 30
    weight = torch.randn(64, dtype=torch.float16)
    normed, summed = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, OPS.rms_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("rotary_dim", [64, 40])
def test_rope_is_a_rotation_of_complex_pairs(rotary_dim: int) -> None:
    half = rotary_dim // 2
    angles = torch.arange(50).unsqueeze(1) * 0.5 ** torch.arange(half)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    fused = torch.randn(6, 4, 64)
    before = fused.clone()
    positions = torch.tensor([0, 7, 49, 3, 3, 12])
    OPS.apply_rope(fused[:, :3], fused[:, 3:], cos_sin, positions)
    turned = torch.polar(torch.ones(6, 1, half), angles[positions].unsqueeze(1)) * torch.complex(
        before[..., :half], before[..., half:rotary_dim]
    )
    torch.testing.assert_close(fused, torch.cat([turned.real, turned.imag, before[..., rotary_dim:]], dim=-1))


def test_silu_mul_equals_torch() -> None:
    gate_up = torch.randn(5, 100)[:, :66]
    torch.testing.assert_close(OPS.silu_mul(gate_up), F.silu(gate_up[:, :33]) * gate_up[:, 33:])


def test_cache_write_fills_its_slots_and_no_other() -> None:
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    k_cache, v_cache = torch.full((3, 2, 16, 8), -7.0), torch.full((3, 2, 16, 8), -7.0)
    OPS.cache_write(k, v, k_cache, v_cache, torch.tensor([0, -1, 47, 17]))
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[0, :, 0], new[0])
        assert torch.equal(cache[2, :, 15], new[2])
        assert torch.equal(cache[1, :, 1], new[3])
        assert (cache == -7.0).sum() == cache.numel() - 3 * 2 * 8


def test_bad_input_is_refused_by_name() -> None:
    batch = make_batch([(1, 5)])
    attention = (batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.cu_seqlens_q, batch.seq_lens)
    with pytest.raises(InvalidInput, match=r"paged_attention: block_tables must be a contiguous torch.int32"):
        OPS.paged_attention(*attention[:3], batch.block_tables.long(), *attention[4:], scale=1.0, max_query_len=1)
    with pytest.raises(InvalidInput, match=r"paged_attention: cu_seqlens_q .* of shape"):
        OPS.paged_attention(*attention[:4], batch.seq_lens, batch.seq_lens, scale=1.0, max_query_len=1)
    with pytest.raises(InvalidInput, match=r"paged_attention: q has 3 heads, not a multiple of the cache's 2"):
        OPS.paged_attention(batch.q[:, :3], *attention[1:], scale=1.0, max_query_len=1)
    with pytest.raises(InvalidInput, match=r"window must not be negative"):
        OPS.paged_attention(*attention, scale=1.0, max_query_len=1, window=-1)
    with pytest.raises(InvalidInput, match=r"out must have q's shape"):
        OPS.paged_attention(*attention, scale=1.0, max_query_len=1, out=torch.empty(1, 1, 64))
    with pytest.raises(InvalidInput, match=r"rms_norm: weight must have shape \[8\]"):
        OPS.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5)
    with pytest.raises(InvalidInput, match=r"rms_norm: x must be contiguous in its last dimension"):
        OPS.rms_norm(torch.ones(8, 2).t(), torch.ones(8), 1e-5)
    with pytest.raises(InvalidInput, match=r"add_rms_norm: residual must be torch.float32"):
        OPS.add_rms_norm(torch.ones(2, 8), torch.ones(2, 8, dtype=torch.float16), torch.ones(8), 1e-5)
    with pytest.raises(InvalidInput, match=r"silu_mul: gate_up must have an even width, has 7"):
        OPS.silu_mul(torch.ones(2, 7))
    with pytest.raises(InvalidInput, match=r"apply_rope: cos_sin must have an even width up to 8"):
        OPS.apply_rope(torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.ones(4, 10), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvalidInput, match=r"cache_write: slot_mapping"):
        OPS.cache_write(batch.q[:, :2], batch.q[:, :2], *attention[1:3], torch.zeros(1, dtype=torch.int32))
