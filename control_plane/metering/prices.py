"""The price book: what a token and an hour of an accelerator cost. Versions are never changed, only followed.

Amounts are whole billionths of the currency, so that a ledger, a budget and a bill add up to the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NANO = 1_000_000_000
ANY = "*"


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """In currency per million tokens. `cached` is for the part of a prompt that was in the cache."""

    prompt: float
    cached: float
    completion: float


_FREE = TokenPrices(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PriceBook:
    """One version. `models` by model name and `accelerators` (currency per hour) by type; `*` is for the others."""

    version: int
    effective_at: float
    currency: str
    models: Mapping[str, TokenPrices]
    accelerators: Mapping[str, float]

    def tokens_nano(self, model: str, prompt: int, cached: int, completion: int) -> int:
        """What a request's tokens cost, in billionths."""
        price = self.models.get(model) or self.models.get(ANY) or _FREE
        per_million = (prompt - cached) * price.prompt + cached * price.cached + completion * price.completion
        return round(per_million * (NANO // 1_000_000))

    def hours_nano(self, accelerator: str | None, hours: float, count: int) -> int:
        """What `count` accelerators cost for `hours`, in billionths."""
        per_hour = self.accelerators.get(accelerator or "cpu", self.accelerators.get(ANY, 0.0))
        return round(per_hour * max(1, count) * hours * NANO)


FREE = PriceBook(0, 0.0, "USD", {}, {})
"""In force before any other."""


def in_force(books: Sequence[PriceBook], at: float) -> PriceBook:
    """The newest of `books` that was effective at `at`."""
    return max((book for book in books if book.effective_at <= at), key=lambda book: book.version, default=FREE)
