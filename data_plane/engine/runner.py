"""Turns a step's plan into arrays, runs the model on them, and samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data_plane.engine.grammar import Grammars
from data_plane.engine.messages import TokenLogprob
from data_plane.engine.sampler import sample, score
from data_plane.engine.scheduler import Scheduled
from data_plane.models.batch import Array, Batch
from data_plane.models.registry import Model


class Sampled(NamedTuple):
    """A token and what is told of it, or the hidden state that was wanted instead."""

    token: int
    logprob: TokenLogprob | None
    vector: bytes = b""


class Runner:
    """Owns the KV cache and the host copies of block tables.

    Cache memory that was never written is never read.
    """

    def __init__(
        self, model: Model, grammars: Grammars, *, num_blocks: int, block_size: int, max_num_seqs: int, max_len: int
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._block_size = block_size
        self._num_blocks = num_blocks
        self.kv = model.new_cache(num_blocks, block_size)
        self._tables = np.zeros((max_num_seqs, -(-max_len // block_size)), np.int32)
        # whose blocks a row of the tables shows, and how many of them: a sequence gets a new list at every admission
        self._shown: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._filled = [0] * max_num_seqs
        self._weight_bytes = model.weight_bytes()
        self._token_bytes = model.kv_token_bytes

    def release(self) -> None:
        """Give back the cache and the accelerator's memory."""
        self.kv = None
        self._model.release()

    def restore(self) -> bool:
        """Have them again. Returns whether they were gone."""
        if self.kv is not None:
            return False
        self._model.restore()
        self.kv = self._model.new_cache(self._num_blocks, self._block_size)
        self._shown = [[] for _ in self._shown]
        self._filled = [0] * len(self._filled)
        return True

    def check(self) -> None:
        """Raises StageLost where a part of the model is gone."""
        if self.kv is not None:
            self._model.check()

    def run(self, plan: list[Scheduled]) -> dict[str, Sampled]:
        """One forward pass. Returns what came of each sequence whose last token ran, by id.

        Log-probabilities of prompts are added to their sequences.
        """
        sampling = [item.seq for item in plan if item.samples]
        masks = self._grammars.begin_masks(sampling)
        scored = [_scored(item) for item in plan]
        logits = self._model(self._batch(plan, scored), self.kv)
        if any(scored):
            logits = _score(logits, plan, scored)
        if not sampling:
            return {}
        allowed = {row: mask.result() for row, mask in masks.items()}
        tokens, logprobs = sample(logits, sampling, self._model.draw, allowed)
        sampled = {
            seq.id: Sampled(token, logprob) for seq, token, logprob in zip(sampling, tokens, logprobs, strict=True)
        }
        for row, seq in enumerate(sampling):
            if seq.params.embed:
                sampled[seq.id] = Sampled(0, None, self._model.hidden(row).tobytes())
        return sampled

    def bytes_moved(self, plan: list[Scheduled]) -> int:
        """The least a step must read and write: the weights once, and each sequence's keys and values once."""
        return self._weight_bytes + self._token_bytes * sum(item.seq.num_computed + item.count for item in plan)

    def _batch(self, plan: list[Scheduled], scored: list[range]) -> Batch:
        size = self._block_size
        counts = np.fromiter((item.count for item in plan), np.int64, len(plan))
        starts = np.fromiter((item.seq.num_computed for item in plan), np.int64, len(plan))
        ends = np.cumsum(counts)
        total = int(ends[-1])
        tokens = np.empty(total, np.int64)
        at = 0
        for item in plan:
            seq = item.seq
            tokens[at : at + item.count] = seq.tokens[seq.num_computed : seq.num_computed + item.count]
            at += item.count
            self._fill_table(seq.row, seq.blocks)
        owner = np.repeat(np.arange(len(plan)), counts)
        positions = np.arange(total) - np.repeat(ends - counts - starts, counts)
        rows = np.fromiter((item.seq.row for item in plan), np.int64, len(plan))
        seq_lens = starts + counts
        tables = self._tables[rows, : -(-int(seq_lens.max()) // size)]
        slots = tables[owner, positions // size].astype(np.int64) * size + positions % size
        wanted = np.zeros(total, bool)
        wanted[ends - 1] = np.fromiter((item.samples for item in plan), bool, len(plan))
        for end, item, positions_scored in zip(ends, plan, scored, strict=True):
            first = int(end) - item.count - item.seq.num_computed
            wanted[first + positions_scored.start : first + positions_scored.stop] = True
        cu_seqlens = np.zeros(len(plan) + 1, np.int32)
        cu_seqlens[1:] = ends
        return Batch(
            tokens=tokens,
            positions=positions,
            slot_mapping=slots,
            block_tables=np.ascontiguousarray(tables),
            cu_seqlens_q=cu_seqlens,
            seq_lens=seq_lens.astype(np.int32),
            max_query_len=int(counts.max()),
            logit_rows=np.flatnonzero(wanted),
        )

    def _fill_table(self, row: int, blocks: list[int]) -> None:
        known = self._filled[row] if self._shown[row] is blocks else 0
        if known < len(blocks):
            self._tables[row, known : len(blocks)] = blocks[known:]
        self._shown[row], self._filled[row] = blocks, len(blocks)


def _scored(item: Scheduled) -> range:
    """Positions of the part whose logits say how likely the prompt's next token was, and are not known yet."""
    seq = item.seq
    if not seq.unscored:
        return range(0)
    return range(max(seq.num_computed, len(seq.scored)), min(seq.num_computed + item.count, seq.prompt_len - 1))


def _score(logits: Array, plan: list[Scheduled], scored: list[range]) -> Array:
    """Give sequences the log-probabilities of their prompts; return the rows that are for sampling."""
    sampled: list[int] = []
    at = 0
    for item, positions in zip(plan, scored, strict=True):
        seq, count = item.seq, len(positions)
        if count:
            tokens = seq.tokens[positions.start + 1 : positions.stop + 1]
            seq.scored += score(logits[at : at + count], tokens, seq.params.prompt_logprobs)
        at += count
        if item.samples:
            sampled.append(at)
            at += 1
    return np.ascontiguousarray(logits[sampled])
