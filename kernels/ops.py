"""The operations that every backend provides, as types.

Notation: T tokens of the step, S sequences of the step, H hidden size, Hq query heads, Hk key/value heads, D head
size, I MLP size, M block-table width. Floating dtypes are float16, bfloat16 and float32; arithmetic is float32 and
rounds once, to the dtype of the input. The last dimension of every tensor is contiguous; other strides are free
where a signature says "strided". Each operation raises `InvalidInput` for a wrong shape, dtype or layout; the values
inside index tensors are the caller's promise, because looking at them would stall an accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x², last) + eps) · weight.

        x [T, H] or [T, heads, H], strided; weight [H]. Returns a new contiguous tensor like x.
        """
        ...


class AddRmsNorm(Protocol):
    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The residual addition and the norm after it, in one pass.

        x and residual [T, H], strided, of one dtype; weight [H]. Returns (norm of the sum, the sum), both new and
        contiguous. The sum is rounded to x's dtype, since it is the residual stream; the norm is of what was rounded.
        """
        ...


class ApplyRope(Protocol):
    def __call__(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        """Rotate q [T, Hq, D] and k [T, Hk, D], strided, in place (rotary position embedding, arXiv:2104.09864).

        cos_sin [max_position, R] float32 is cat(cos, sin) along the last dimension, R even and ≤ D; the first R
        dimensions rotate in halves (i with i + R/2), the others stay. positions [T] int64 < max_position.
        """
        ...


class SiluMul(Protocol):
    def __call__(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up for gate_up [T, 2·I] = cat(gate, up), strided. Returns [T, I], new."""
        ...


class CacheWrite(Protocol):
    def __call__(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store k and v [T, Hk, D], strided, in the paged caches [blocks, Hk, block_size, D], strided.

        slot_mapping [T] int64: token t goes to block slot // block_size at offset slot % block_size; a negative slot
        is skipped. Slots of one call are distinct.
        """
        ...


class PagedAttention(Protocol):
    def __call__(
        self,
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
        """Causal attention of a mixed batch (prefill, chunks, decode, verification) over the paged cache.

        q [T, Hq, D], strided; caches [blocks, Hk, block_size, D], strided, with this step's keys and values already
        written; block_tables [S, M] int32; cu_seqlens_q [S+1] int32, cu_seqlens_q[0] = 0; seq_lens [S] int32.
        Sequence s owns the rows cu_seqlens_q[s] … cu_seqlens_q[s+1]; its query i sits at position
        seq_lens[s] - query_len + i and sees the positions up to its own, only the last `window` of them if window > 0.
        Query head h reads key/value head h // (Hq // Hk). A sequence may have no query. max_query_len is an upper
        bound on the longest query. T may exceed cu_seqlens_q[S]; the rows beyond are unspecified. Slots that no query
        sees, and table entries past them, may hold anything. Returns out [T, Hq, D], strided, or a new tensor.
        """
        ...


@dataclass(frozen=True)
class Ops:
    """One backend's operations."""

    name: str
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    apply_rope: ApplyRope
    silu_mul: SiluMul
    cache_write: CacheWrite
    paged_attention: PagedAttention
