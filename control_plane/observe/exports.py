"""Where spans and metrics of a region may go. Pure.

A region that has a collector of its own sends to that one alone. One that has a jurisdiction and no such collector
sends nothing, whatever the environment says: nobody vouches for where that one's is. All others send to where
`OTEL_EXPORTER_OTLP_ENDPOINT` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

GENERAL = "OTEL_EXPORTER_OTLP"
_SIGNALS = ("TRACES", "METRICS")
HEADERS = (f"{GENERAL}_HEADERS", *(f"{GENERAL}_{signal}_HEADERS" for signal in _SIGNALS))
"""They carry what the environment's collector asks of callers: nothing for another one."""


class Why(StrEnum):
    REGION = "region"
    ENVIRONMENT = "environment"
    WITHHELD = "withheld"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Export:
    """`endpoint` is None where nothing is sent; `protocol` is as the environment has it, `grpc` or `http/protobuf`."""

    endpoint: str | None
    why: Why
    protocol: str = "http/protobuf"

    @property
    def variables(self) -> dict[str, str]:
        """What a replica's environment has to say, whatever else is in it."""
        if self.why is Why.WITHHELD:
            return {f"{GENERAL}_ENDPOINT": ""}
        if self.why is not Why.REGION or self.endpoint is None:
            return {}
        found = {f"{GENERAL}_ENDPOINT": self.endpoint, f"{GENERAL}_PROTOCOL": self.protocol} | dict.fromkeys(
            HEADERS, ""
        )
        for signal in _SIGNALS:
            found[f"{GENERAL}_{signal}_ENDPOINT"] = self.place_of(signal.lower())
            found[f"{GENERAL}_{signal}_PROTOCOL"] = self.protocol
        return found

    def place_of(self, signal: str) -> str:
        """Where `traces` or `metrics` are sent."""
        endpoint = (self.endpoint or "").rstrip("/")
        return endpoint if self.protocol == "grpc" else f"{endpoint}/v1/{signal}"


class Place(Protocol):
    """A region, as the settings have it."""

    @property
    def name(self) -> str: ...
    @property
    def jurisdiction(self) -> str | None: ...
    @property
    def otlp_endpoint(self) -> str | None: ...


def exports_of(regions: Iterable[Place], environ: Mapping[str, str]) -> dict[str, Export]:
    """By region."""
    given = environ.get(f"{GENERAL}_ENDPOINT") or environ.get(f"{GENERAL}_TRACES_ENDPOINT")
    general = environ.get(f"{GENERAL}_PROTOCOL") or "http/protobuf"
    protocol = environ.get(f"{GENERAL}_TRACES_PROTOCOL") or general
    found = {}
    for region in regions:
        if region.otlp_endpoint is not None:
            found[region.name] = Export(region.otlp_endpoint, Why.REGION, protocol)
        elif region.jurisdiction is not None:
            found[region.name] = Export(None, Why.WITHHELD)
        else:
            found[region.name] = Export(given or None, Why.ENVIRONMENT if given else Why.OFF, protocol)
    return found
