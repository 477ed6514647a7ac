"""What the operations demand of their inputs, the same for every backend. Only metadata is looked at, never values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _demand(condition: bool, op: str, complaint: str) -> None:
    if not condition:
        raise InvalidInput(f"{op}: {complaint}")


def _floating(op: str, **tensors: Tensor) -> None:
    """All of one floating dtype on one device, each with a contiguous last dimension."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS or tensor.dtype != first.dtype:
            wanted = first.dtype if first.dtype in FLOATS else "float16, bfloat16 or float32"
            raise InvalidInput(f"{op}: {name} must be {wanted}, got {tensor.dtype}")
        if tensor.device != first.device:
            raise InvalidInput(f"{op}: {name} must be on {first.device}, is on {tensor.device}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise InvalidInput(f"{op}: {name} must be contiguous in its last dimension, strides are {tensor.stride()}")


def _index(op: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
            raise InvalidInput(
                f"{op}: {name} must be a contiguous {dtype} of shape {list(shape)} on {device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )


def check_rms_norm(op: str, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    _demand(x.dim() in (2, 3), op, f"x must have 2 or 3 dimensions, has {x.dim()}")
    _floating(op, x=x)
    _floating(op, weight=weight)
    _demand(weight.device == x.device, op, f"weight must be on {x.device}, is on {weight.device}")
    _demand(weight.shape == x.shape[-1:], op, f"weight must have shape [{x.shape[-1]}], has {list(weight.shape)}")
    if residual is not None:
        _floating(op, x=x, residual=residual)
        _demand(x.dim() == 2, op, f"x must have 2 dimensions, has {x.dim()}")
        complaint = f"residual must have x's shape {list(x.shape)}, has {list(residual.shape)}"
        _demand(residual.shape == x.shape, op, complaint)


def check_apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    op = "apply_rope"
    _floating(op, q=q, k=k)
    _demand(q.dim() == 3, op, f"q must have 3 dimensions, has {q.dim()}")
    tokens, _, head_dim = q.shape
    fits = k.dim() == 3 and k.shape[0] == tokens and k.shape[2] == head_dim
    _demand(fits, op, f"k must have shape [{tokens}, Hk, {head_dim}], has {list(k.shape)}")
    _demand(cos_sin.dim() == 2 and cos_sin.dtype == torch.float32, op, "cos_sin must be a float32 matrix")
    _demand(cos_sin.is_contiguous() and cos_sin.device == q.device, op, f"cos_sin must be contiguous on {q.device}")
    rotary_dim = cos_sin.shape[1]
    _demand(rotary_dim % 2 == 0 and 0 < rotary_dim <= head_dim, op, f"cos_sin must have an even width up to {head_dim}")
    _index(op, torch.int64, (tokens,), q.device, positions=positions)


def check_silu_mul(gate_up: Tensor) -> None:
    _demand(gate_up.dim() == 2, "silu_mul", f"gate_up must have 2 dimensions, has {gate_up.dim()}")
    _demand(gate_up.shape[1] % 2 == 0, "silu_mul", f"gate_up must have an even width, has {gate_up.shape[1]}")
    _floating("silu_mul", gate_up=gate_up)


def _check_caches(op: str, heads: int | None, head_dim: int, k_cache: Tensor, v_cache: Tensor) -> None:
    fits = k_cache.dim() == 4 and k_cache.shape[3] == head_dim and heads in (None, k_cache.shape[1])
    wanted = f"[blocks, {'Hk' if heads is None else heads}, block_size, {head_dim}]"
    _demand(fits, op, f"k_cache must have shape {wanted}, has {list(k_cache.shape)}")
    complaint = f"v_cache must have k_cache's shape {list(k_cache.shape)}, has {list(v_cache.shape)}"
    _demand(v_cache.shape == k_cache.shape, op, complaint)


def check_cache_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    op = "cache_write"
    _floating(op, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    _demand(k.dim() == 3, op, f"k must have 3 dimensions, has {k.dim()}")
    _demand(v.shape == k.shape, op, f"v must have k's shape {list(k.shape)}, has {list(v.shape)}")
    _check_caches(op, k.shape[1], k.shape[2], k_cache, v_cache)
    _index(op, torch.int64, (k.shape[0],), k.device, slot_mapping=slot_mapping)


def check_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    window: int,
    out: Tensor | None,
) -> None:
    op = "paged_attention"
    _floating(op, q=q, k_cache=k_cache, v_cache=v_cache)
    _demand(q.dim() == 3, op, f"q must have 3 dimensions, has {q.dim()}")
    _check_caches(op, None, q.shape[2], k_cache, v_cache)
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    _demand(heads % kv_heads == 0, op, f"q has {heads} heads, not a multiple of the cache's {kv_heads}")
    _demand(block_tables.dim() == 2, op, f"block_tables must have 2 dimensions, has {block_tables.dim()}")
    sequences, width = block_tables.shape
    _index(op, torch.int32, (sequences, width), q.device, block_tables=block_tables)
    _index(op, torch.int32, (sequences + 1,), q.device, cu_seqlens_q=cu_seqlens_q)
    _index(op, torch.int32, (sequences,), q.device, seq_lens=seq_lens)
    _demand(max_query_len >= 0, op, f"max_query_len must not be negative, is {max_query_len}")
    _demand(window >= 0, op, f"window must not be negative, is {window}")
    if out is not None:
        _floating(op, q=q, out=out)
        _demand(out.shape == q.shape, op, f"out must have q's shape {list(q.shape)}, has {list(out.shape)}")
