"""Usage, prices, cost and drift, as the admin API speaks of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from control_plane.api.fields import Price
from control_plane.api.schemas import Input


class TokenPrices(Input):
    """In currency per million tokens. `cached` is for the part of a prompt that was in the cache."""

    prompt: Price
    cached: Price
    completion: Price


class PricesCreate(Input):
    """The next version of the price book. `*` is for models and accelerators that aren't named."""

    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    models: Annotated[dict[Annotated[str, Field(max_length=2048)], TokenPrices], Field(max_length=1000)]
    accelerators: Annotated[dict[Annotated[str, Field(max_length=64)], Price], Field(max_length=100)]


class Prices(BaseModel):
    version: int
    effective_at: str
    currency: str
    models: dict[str, TokenPrices]
    accelerators: dict[str, float]


class Cost(BaseModel):
    """What an endpoint cost and what its tokens brought in; amounts in `currency`. Tokens are by whole UTC hours."""

    tenant: str
    endpoint: str
    endpoint_id: str
    """Another endpoint may have had the same name before."""
    deleted_at: str | None
    region: str
    accelerator: str
    currency: str
    replica_hours: float
    idle_hours: float | None
    """Null where single requests of that time aren't kept any more, which would tell."""
    replicas_cost: float
    warmth_cost: float | None
    """The idle hours' part of `replicas_cost`."""
    requests: int
    tokens: int
    tokens_price: float


class CostLine(BaseModel):
    """A while of one replica on one rung of warmth, under one price book."""

    endpoint: str
    endpoint_id: str
    deleted_at: str | None
    """Of the endpoint."""
    replica: str
    rung: str
    since: str
    until: str
    hours: float
    price_per_hour: float
    price_version: int
    amount: float
    currency: str


class Drift(BaseModel):
    """`kind` is ours_missing (the provider has what we don't know), theirs_missing, or times_differ: it began at
    another time than it is billed from. Null `settled_at`: it stands."""

    replica: str
    kind: str
    region: str | None
    """Of one that we don't know: where its provider says that it is. Null where it can't say."""
    we_say: str
    they_say: str | None
    amount: float | None
    """Above 0 is billed and isn't there, below 0 is there and isn't billed; null where nobody knows its price."""
    currency: str | None
    since: str
    seen_at: str
    settled_at: str | None


class Usage(BaseModel):
    hour: str | None = None
    tenant: str
    endpoint: str
    region: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    wasted_tokens: int
    price: float
    mean_duration_ms: float | None
    mean_ttft_ms: float | None
