"""Runs a loaded model's forward pass on hand-made batches, to see every logit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from data_plane.engine.loader import Loaded
from data_plane.models.batch import Array, Batch


@dataclass(frozen=True)
class Part:
    """tokens[start:end] of a sequence whose cache lies in `blocks`; what is before `start` was run earlier."""

    tokens: list[int]
    start: int
    end: int
    blocks: list[int]


def logits_of(loaded: Loaded, tokens: list[int], *, first_block: int = 0) -> Array:
    """float32 [len(tokens), vocabulary] of one sequence, run in one batch."""
    count = -(-len(tokens) // loaded.limits.block_size)
    return run(loaded, [Part(tokens, 0, len(tokens), [*range(first_block, first_block + count)])])[0]


def run(loaded: Loaded, parts: list[Part]) -> list[Array]:
    """One step over all parts; float32 logits [end - start, vocabulary] of each."""
    size = loaded.limits.block_size
    counts = [part.end - part.start for part in parts]
    positions = np.concatenate([np.arange(part.start, part.end) for part in parts])
    tables = np.zeros((len(parts), max(len(part.blocks) for part in parts)), np.int32)
    for row, part in enumerate(parts):
        tables[row, : len(part.blocks)] = part.blocks
    owner = np.repeat(np.arange(len(parts)), counts)
    bounds = np.cumsum([0, *counts])
    logits = loaded.runner._model(
        Batch(
            tokens=np.concatenate([np.array(part.tokens[part.start : part.end], np.int64) for part in parts]),
            positions=positions,
            slot_mapping=tables[owner, positions // size].astype(np.int64) * size + positions % size,
            block_tables=tables,
            cu_seqlens_q=bounds.astype(np.int32),
            seq_lens=np.array([part.end for part in parts], np.int32),
            max_query_len=max(counts),
            logit_rows=np.arange(len(positions)),
        ),
        loaded.runner.kv,
    )
    # a model may write the next step's logits over these
    return [logits[start:end].copy() for start, end in pairwise(bounds)]


def log_likelihood(logits: Array, tokens: list[int]) -> float:
    """Sum of log-probabilities of tokens[1:], each by the logits of the token before it."""
    wide = logits[:-1].astype(np.float64)
    normal = wide.max(axis=1) + np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1))
    return float((wide[np.arange(len(tokens) - 1), tokens[1:]] - normal).sum())
