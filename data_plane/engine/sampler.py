"""From logits to tokens, without sorting the vocabulary and without state.

The uniform for a token is a hash of (seed, choice, place in the reply): it survives batching, preemption and n > 1
(after the counter-based generators of Salmon et al., 2011).
"""

from __future__ import annotations

import torch

from data_plane.engine.messages import TokenLogprob
from data_plane.engine.request import Sequence

_MASK = (1 << 64) - 1
_CANDIDATES = 256
VERY_UNLIKELY = -9999.0


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) from three integers: each goes through one round of splitmix64."""
    state = 0
    for word in (seed, choice, position):
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def sample(logits: torch.Tensor, seqs: list[Sequence]) -> tuple[list[int], list[TokenLogprob | None]]:
    """Choose a token for each sequence. logits: float32 [R, V], row i belongs to seqs[i]; may be overwritten."""
    wanted = [row for row, seq in enumerate(seqs) if seq.params.logprobs >= 0]
    raw = torch.log_softmax(logits[wanted], dim=-1) if wanted else None
    for row, seq in enumerate(seqs):
        _adjust(logits[row], seq)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    random = [row for row, seq in enumerate(seqs) if seq.params.temperature > 0]
    filtered = [row for row in random if _is_filtered(seqs[row])]
    free = [row for row in random if not _is_filtered(seqs[row])]
    for rows, draw in ((filtered, _draw_filtered), (free, _draw_free)):
        if rows:
            chosen = draw(logits[rows], [seqs[row] for row in rows])
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
    logprobs: list[TokenLogprob | None] = [None] * len(seqs)
    if raw is not None:
        for place, row in enumerate(wanted):
            logprobs[row] = _logprob(raw[place], tokens[row], seqs[row].params.logprobs)
    return tokens, logprobs


def _is_filtered(seq: Sequence) -> bool:
    params = seq.params
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _adjust(row: torch.Tensor, seq: Sequence) -> None:
    """Penalties and bias, in place on one row. Only the tokens that occurred are touched."""
    params = seq.params
    if params.repetition_penalty != 1 and seq.tokens:
        seen = torch.unique(torch.tensor(seq.tokens, device=row.device))
        values = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and seq.num_generated:
        replies = torch.tensor(seq.tokens[seq.prompt_len :], device=row.device)
        said, counts = torch.unique(replies, return_counts=True)
        row[said] -= params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)


def _uniforms(seqs: list[Sequence], device: torch.device) -> torch.Tensor:
    numbers = [uniform(seq.params.seed, seq.params.choice, seq.num_generated) for seq in seqs]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _scaled(logits: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    heats = torch.tensor([max(seq.params.temperature, 1e-5) for seq in seqs], device=logits.device)
    return logits / heats[:, None]


def _draw_free(logits: torch.Tensor, seqs: list[Sequence]) -> list[int]:
    """Inverse transform over the whole vocabulary in token order."""
    return _invert(torch.softmax(_scaled(logits, seqs), dim=-1), _uniforms(seqs, logits.device))


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> list[int]:
    """For each row of non-negative weights [R, N] the place where their running sum passes uniform · total."""
    sums = weights.double().cumsum(dim=-1)
    places = torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True).squeeze(1)
    # rounding may point past the last weight; the last one that is not zero is meant
    last = (weights > 0).to(torch.int8).cumsum(dim=-1).argmax(dim=-1)
    chosen: list[int] = torch.minimum(places, last).tolist()
    return chosen


def _draw_filtered(logits: torch.Tensor, seqs: list[Sequence]) -> list[int]:
    """top-k, then top-p among what is left, then min-p against the likeliest; then inverse transform.

    Only the likeliest candidates are sorted; a row whose nucleus is wider is sorted whole.
    """
    scaled = _scaled(logits, seqs)
    vocabulary = scaled.shape[1]
    width = min(vocabulary, max(_CANDIDATES, max(seq.params.top_k for seq in seqs)))
    totals = scaled.logsumexp(dim=-1, keepdim=True)
    values, ids = scaled.topk(width, dim=-1)
    chosen: list[int] = []
    uniforms = _uniforms(seqs, logits.device)
    for row, seq in enumerate(seqs):
        weights, kept = (values[row] - totals[row]).exp(), ids[row]
        if _needs_more(weights, seq) and width < vocabulary:
            weights, kept = (scaled[row] - totals[row]).exp().sort(descending=True, stable=True)
        weights = _filter(weights, seq)
        place = _invert(weights[None], uniforms[row : row + 1])[0]
        chosen.append(int(kept[place]))
    return chosen


def _needs_more(weights: torch.Tensor, seq: Sequence) -> bool:
    params = seq.params
    if 0 < params.top_k <= len(weights):
        return False
    if params.top_p < 1 and float(weights.sum()) >= params.top_p:
        return False
    return not (params.min_p > 0 and float(weights[-1]) < params.min_p * float(weights[0]))


def _filter(weights: torch.Tensor, seq: Sequence) -> torch.Tensor:
    """Zero what the sequence's limits exclude. weights: [N] descending, of a distribution over the whole vocabulary."""
    params = seq.params
    weights = weights.clone()
    if params.top_k > 0:
        weights[params.top_k :] = 0
    if params.top_p < 1:
        total = weights.sum() if params.top_k > 0 else 1.0
        before = weights.cumsum(dim=0) - weights
        outside = before >= params.top_p * total
        outside[0] = False
        weights[outside] = 0
    if params.min_p > 0:
        weights[weights < params.min_p * weights[0]] = 0
    return weights


def _logprob(row: torch.Tensor, token: int, count: int) -> TokenLogprob:
    def finite(value: float) -> float:
        return value if value > VERY_UNLIKELY else VERY_UNLIKELY

    top: list[tuple[int, float]] = []
    if count:
        values, ids = row.topk(count)
        top = [(int(id), finite(float(value))) for id, value in zip(ids, values, strict=True)]
    return TokenLogprob(token, finite(float(row[token])), top)
