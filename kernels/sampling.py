"""Drawing tokens from logits, in numpy: what every backend's `draw` must agree with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_CANDIDATES = 256


@dataclass(frozen=True)
class Draws:
    """One entry a row. temperature 0 takes the likeliest; top_k 0, top_p 1 and min_p 0 are off.

    temperature, top_p, min_p: float32 [R]; top_k: int32 [R]; uniforms: float64 [R] in [0, 1).
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    uniforms: Array


def draw(logits: Array, draws: Draws) -> list[int]:
    """A token for each row of float32 logits [R, V].

    Without filters the draw inverts the distribution in token order. With them, tokens are ordered by weight, ties
    by id, and kept while top-k, then top-p of what top-k left, then min-p against the likeliest allow; the draw inverts
    that. Of a row that holds NaN, or nothing but -inf, some token is given whose logit is that.
    """
    tokens: list[int] = logits.argmax(axis=1).tolist()
    for row in np.flatnonzero((draws.temperature > 0) & np.isfinite(logits.max(axis=1))):
        scaled = (logits[row] - logits[row].max()) / draws.temperature[row]
        tokens[row] = _draw_row(np.exp(scaled, dtype=np.float32), draws, int(row))
    return tokens


def _draw_row(weights: Array, draws: Draws, row: int) -> int:
    top_k, top_p, min_p = int(draws.top_k[row]), float(draws.top_p[row]), float(draws.min_p[row])
    uniform = float(draws.uniforms[row])
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return _invert(weights, uniform)
    order = _candidates(weights, top_k, top_p, min_p)
    kept = weights[order].astype(np.float64)
    if top_k > 0:
        kept = kept[:top_k]
    total = kept.sum() if top_k > 0 else weights.sum(dtype=np.float64)
    if top_p < 1:
        before = np.cumsum(kept) - kept
        kept = kept[: max(int((before < top_p * total).sum()), 1)]
    kept = kept[kept >= min_p * kept[0]]
    return int(order[_invert(kept, uniform)])


def _candidates(weights: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """Ids by falling weight: enough of them for what the filters can keep."""
    count = max(_CANDIDATES, top_k)
    if count < len(weights):
        likeliest = np.argpartition(weights, -count)[-count:]
        least = weights[likeliest].min()
        enough = (
            top_k > 0
            or weights[likeliest].sum(dtype=np.float64) >= top_p * weights.sum(dtype=np.float64)
            or least < min_p * weights.max()
        )
        # all that weigh as much as the last come along, so that ties fall the same way
        if enough:
            likeliest = np.flatnonzero(weights >= least)
            return likeliest[np.argsort(-weights[likeliest], kind="stable")]
    return np.argsort(-weights, kind="stable")


def _invert(weights: Array, uniform: float) -> int:
    """The first place where the running sum passes uniform · total; never one of weight zero."""
    sums = np.cumsum(weights, dtype=np.float64)
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(place, int(np.flatnonzero(weights > 0)[-1]))
