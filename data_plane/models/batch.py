"""The arrays of one engine step, as a model sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Batch:
    """T tokens of S sequences, one after the other; R of them want logits.

    tokens, positions, slot_mapping: int64 [T]; block_tables: int32 [S, M]; cu_seqlens_q: int32 [S + 1]; seq_lens: int32
    [S], context with this step's tokens; logit_rows: int64 [R], indexes into T. All contiguous, in host memory.
    """

    tokens: Array
    positions: Array
    slot_mapping: Array
    block_tables: Array
    cu_seqlens_q: Array
    seq_lens: Array
    max_query_len: int
    logit_rows: Array
