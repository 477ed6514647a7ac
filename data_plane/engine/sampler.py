"""From logits to tokens: what a sequence's parameters change, what is drawn, and what is told of it.

The uniform for a token is a hash of (seed, choice, place in the reply): it survives batching, preemption and n > 1
(after the counter-based generators of Salmon et al., 2011).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from data_plane.engine.grammar import apply_mask
from data_plane.engine.messages import TokenLogprob
from data_plane.engine.request import Sequence
from kernels.sampling import Draws

Array = np.ndarray[Any, Any]
VERY_UNLIKELY = -9999.0
NOTHING = -1
_MASK = (1 << 64) - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) from three integers: each goes through one round of splitmix64."""
    state = 0
    for word in (seed, choice, position):
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def sample(
    logits: Array,
    seqs: list[Sequence],
    draw: Callable[[Array, Draws], list[int]],
    masks: dict[int, bytes] | None = None,
) -> tuple[list[int], list[TokenLogprob | None]]:
    """Choose a token for each sequence. logits: float32 [R, V], row i belongs to seqs[i]; may be overwritten.

    masks: for constrained rows, a bit a token (see `grammar.apply_mask`). A row in which no token is possible, because
    its logits are no numbers or its mask leaves none, gets NOTHING and no logprob.
    """
    wanted = [row for row, seq in enumerate(seqs) if seq.params.logprobs >= 0]
    raw = {row: _log_softmax(logits[row]) for row in wanted}
    for row, seq in enumerate(seqs):
        _adjust(logits[row], seq)
    for row, mask in (masks or {}).items():
        apply_mask(logits[row], mask)
    drawn = draw(logits, _draws(seqs))
    possible = np.isfinite(logits[np.arange(len(seqs)), drawn])
    tokens = [token if good else NOTHING for token, good in zip(drawn, possible, strict=True)]
    logprobs: list[TokenLogprob | None] = [None] * len(seqs)
    for row in wanted:
        if tokens[row] != NOTHING:
            logprobs[row] = _logprob(raw[row], tokens[row], seqs[row].params.logprobs)
    return tokens, logprobs


def score(logits: Array, tokens: list[int], count: int) -> list[TokenLogprob]:
    """How likely each of `tokens` was by its row of float32 logits [R, V], with the `count` likeliest."""
    return [_logprob(_log_softmax(row), token, count) for row, token in zip(logits, tokens, strict=True)]


def _draws(seqs: list[Sequence]) -> Draws:
    params = [seq.params for seq in seqs]
    return Draws(
        temperature=np.array([item.temperature for item in params], np.float32),
        top_k=np.array([item.top_k for item in params], np.int32),
        top_p=np.array([item.top_p for item in params], np.float32),
        min_p=np.array([item.min_p for item in params], np.float32),
        uniforms=np.array(
            [
                uniform(seq.params.seed, seq.params.choice, seq.num_generated) if seq.params.temperature > 0 else 0.0
                for seq in seqs
            ]
        ),
    )


def _adjust(row: Array, seq: Sequence) -> None:
    """Penalties and bias, in place on one row. Only the tokens that occurred are touched."""
    params = seq.params
    if params.repetition_penalty != 1 and seq.tokens:
        seen = np.unique(seq.tokens)
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and seq.num_generated:
        said, counts = np.unique(seq.tokens[seq.prompt_len :], return_counts=True)
        row[said] -= params.presence_penalty + params.frequency_penalty * counts.astype(row.dtype)
    if params.logit_bias:
        row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), row.dtype)


def _log_softmax(row: Array) -> Array:
    with np.errstate(invalid="ignore"):  # what is no number stays none, and is found when a token is drawn
        shifted = row - row.max()
        normal: Array = shifted - np.log(np.exp(shifted).sum(dtype=np.float64))
    return normal


def _logprob(row: Array, token: int, count: int) -> TokenLogprob:
    def finite(value: float) -> float:
        return max(value, VERY_UNLIKELY) if value == value else VERY_UNLIKELY

    top: list[tuple[int, float]] = []
    if count:
        ids = np.argpartition(row, -count)[-count:] if count < len(row) else np.arange(len(row))
        ids = ids[np.argsort(-row[ids], kind="stable")]
        top = [(int(id), finite(float(row[id]))) for id in ids]
    return TokenLogprob(token, finite(float(row[token])), top)
