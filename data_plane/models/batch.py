"""The tensors of one engine step, as a model sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """T tokens of S sequences, one after the other; R of them want logits.

    tokens, positions, slot_mapping: int64 [T]; block_tables: int32 [S, M]; cu_seqlens_q: int32 [S + 1]; seq_lens: int32
    [S], context with this step's tokens; logit_rows: int64 [R], indexes into T.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    logit_rows: torch.Tensor
