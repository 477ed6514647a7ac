"""Triton's norms, rotary embedding, activation and cache write against the reference, among poison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference import OPS as REFERENCE
from tests.kernels.batches import POISON
from tests.kernels.triton_backend import DEVICE, DTYPES, TRITON, recording

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
GUARD = -7.0


def noise(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def among(value: Tensor, filler: float, *, inner: int = 5) -> Tensor:
    """A copy of `value` as a strided view of a larger buffer, filled all around and between its rows."""
    buffer = torch.full((value.shape[0] + 4, *value.shape[1:-1], value.shape[-1] + inner), filler).to(
        DEVICE, value.dtype
    )
    view = buffer[2:-2, ..., : value.shape[-1]]
    view.copy_(value)
    return view


def guard_of(view: Tensor) -> Tensor:
    """What is around a view that `among` made."""
    assert view._base is not None
    outside = torch.ones_like(view._base, dtype=torch.bool)
    outside[2:-2, ..., : view.shape[-1]] = False
    return view._base[outside]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def run_guarded(operation: Callable[[], Tensor | tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The results of an operation whose output buffers are moved between guard elements, which must survive."""
    with recording() as launches:
        made = operation()
    results = made if isinstance(made, tuple) else (made,)
    buffers = [torch.full((result.numel() + 64,), GUARD).to(result) for result in results]
    moved = [buffer[32:-32].view(result.shape) for buffer, result in zip(buffers, results, strict=True)]

    def relocated(argument: Any) -> Any:
        return next((new for new, old in zip(moved, results, strict=True) if argument is old), argument)

    for launch in launches:
        launch.kernel[launch.grid](*map(relocated, launch.arguments), **launch.constants, num_warps=launch.num_warps)
    for buffer in buffers:
        assert (buffer[:32] == GUARD).all()
        assert (buffer[-32:] == GUARD).all()
    return tuple(moved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (33, 80), (3, 1000), (2, 4096)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = among(noise(*shape, dtype=dtype), POISON), noise(shape[1], dtype=dtype)
    (out,) = run_guarded(lambda: TRITON.rms_norm(x, weight, 1e-5))
    assert_close(out, REFERENCE.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rms_norm_of_heads_in_a_fused_projection(head_dim: int) -> None:
    fused, weight = noise(7, 9, head_dim, dtype=torch.float16), noise(head_dim, dtype=torch.float32)
    fused[:, 6:] = POISON
    (out,) = run_guarded(lambda: TRITON.rms_norm(fused[:, :6], weight, 1e-6))
    assert_close(out, REFERENCE.rms_norm(fused[:, :6], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (17, 80), (3, 1000)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = among(noise(*shape, dtype=dtype), POISON), among(noise(*shape, dtype=dtype) * 9, POISON, inner=2)
    weight = noise(shape[1], dtype=dtype)
    normed, summed = run_guarded(lambda: TRITON.add_rms_norm(x, residual, weight, 1e-5))
    expected_normed, expected_summed = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, expected_summed)
    assert_close(normed, expected_normed)
    assert torch.equal(normed, TRITON.rms_norm(summed, weight, 1e-5)), "the norm is of the rounded sum"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 66), (2, 3072), (3, 2 * 1025)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = among(noise(*shape, dtype=dtype), POISON)
    (out,) = run_guarded(lambda: TRITON.silu_mul(gate_up))
    assert_close(out, REFERENCE.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (80, 32), (64, 20)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (32, 8), (1, 1), (7, 7)])
def test_rope(heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    tokens = 4
    fused = among(noise(tokens, heads + kv_heads, head_dim, dtype=dtype), GUARD)
    expected = fused.clone()
    cos_sin = noise(50, rotary_dim, dtype=torch.float32)
    positions = torch.tensor([0, 49, 7, 7], device=DEVICE)
    TRITON.apply_rope(fused[:, :heads], fused[:, heads:], cos_sin, positions)
    REFERENCE.apply_rope(expected[:, :heads], expected[:, heads:], cos_sin, positions)
    assert_close(fused, expected)
    assert torch.equal(fused[..., rotary_dim:], expected[..., rotary_dim:])
    assert (guard_of(fused) == GUARD).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 64), (7, 80), (4, 96), (40, 128)])
def test_cache_write(kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    fused = noise(6, 2 * kv_heads, head_dim, dtype=dtype)
    fused[2] = POISON  # a skipped token
    slots = torch.tensor([0, 5 * block_size - 1, -1, 2 * block_size, block_size - 1, 3 * block_size + 7], device=DEVICE)
    k, v = fused[:, :kv_heads], fused[:, kv_heads:]
    shape = (5, kv_heads, block_size, head_dim)
    k_cache, v_cache, k_expected, v_expected = (among(torch.full(shape, GUARD, dtype=dtype), GUARD) for _ in range(4))
    TRITON.cache_write(k, v, k_cache, v_cache, slots)
    REFERENCE.cache_write(k, v, k_expected, v_expected, slots)
    for actual, expected in ((k_cache, k_expected), (v_cache, v_expected)):
        assert torch.equal(actual, expected)
        assert (guard_of(actual) == GUARD).all()
        assert (actual != GUARD).sum() > 0


def test_a_step_without_tokens() -> None:
    def none(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    heads, cache, nothing = none(0, 2, 64), none(3, 2, 16, 64), none(0, dtype=torch.int64)
    with recording() as launches:
        assert TRITON.rms_norm(none(0, 64), none(64), 1e-5).shape == (0, 64)
        assert TRITON.silu_mul(none(0, 64)).shape == (0, 32)
        TRITON.apply_rope(heads, heads, none(9, 64), nothing)
        TRITON.cache_write(heads, heads, cache, cache, nothing)
    assert launches == []
