"""What fields of the admin API may hold. What is wrong with a value is said by pydantic, at its field."""

from __future__ import annotations

import ipaddress
import zoneinfo
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from control_plane.domain import NAME_PATTERN

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=63, description="a DNS label")]
PLAIN = r"^[^\x00-\x1f\x7f]*$"
Model = Annotated[
    str, Field(min_length=1, max_length=2048, pattern=PLAIN, description="a model's name, path or address")
]
Gpu = Annotated[str, Field(min_length=1, max_length=64, pattern=PLAIN, description="an accelerator type")]
EngineArgs = Annotated[list[Annotated[str, Field(max_length=1024, pattern=PLAIN)]], Field(max_length=64)]
Replicas = Annotated[int, Field(ge=0, le=64)]
IdleTimeout = Annotated[float, Field(ge=1, le=86_400 * 7, description="seconds without a request before it sleeps")]
MaxWait = Annotated[float, Field(ge=0, le=3600, description="seconds that a request is held while a replica starts")]
Concurrency = Annotated[int, Field(ge=1, le=100_000, description="requests open at once")]
Lifetime = Annotated[float, Field(ge=1, le=86_400 * 3650, description="seconds until it expires")]
Grace = Annotated[float, Field(ge=0, le=86_400 * 30, description="seconds that the old key still works")]
Retention = Annotated[
    float, Field(ge=3600, le=86_400 * 3650, description="seconds that usage events and endpoint events are kept")
]
Preset = Annotated[
    Literal["chat", "throughput", "edge"],
    Field(description="engine settings by scenario, put into engine_args where those don't give them"),
]


def _zone(text: str) -> str:
    if text not in zoneinfo.available_timezones():
        raise ValueError(f"{text!r} isn't a time zone, such as Europe/Berlin")
    return text


Warmth = Annotated[
    Literal["cold", "ember", "asleep", "hot", "auto"],
    Field(description="what is kept while nobody calls; auto is the cheapest that meets max_wait"),
]
Target = Annotated[float, Field(ge=0.5, le=100_000, description="requests at once that a replica should carry")]
Slo = Annotated[float, Field(gt=0, le=3600, description="seconds to the first token that 95 of 100 should keep")]
Canary = Annotated[int, Field(ge=1, le=99, description="percent of requests for a generation that is tried")]
Zone = Annotated[str, AfterValidator(_zone), Field(max_length=64, description="a time zone's IANA name")]
PerMinute = Annotated[int, Field(ge=1, le=10**12)]
Budget = Annotated[float, Field(gt=0, le=10**9, description="a UTC month's, in the price book's currency")]
Spend = Annotated[float, Field(gt=0, le=10**9, description="what replicas may cost in a UTC month")]
Price = Annotated[float, Field(ge=0, le=10**6)]
Route = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models"]


def _network(text: str) -> str:
    return str(ipaddress.ip_network(text))


Network = Annotated[str, AfterValidator(_network), Field(description="CIDR notation")]
