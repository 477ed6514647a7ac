"""What every part of the settings is made of."""

from __future__ import annotations

import ipaddress
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from control_plane.domain import Address, is_name

Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _address(text: str) -> str:
    Address.parse(text)
    return text


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError("must be a DNS label: lower-case letters, digits and hyphens")
    return text


def _network(text: str) -> str:
    return str(ipaddress.ip_network(text))


def _domain(text: str) -> str:
    name = text.lower().rstrip(".")
    if not all(is_name(label) for label in name.split(".")):
        raise ValueError("must be a domain name, such as llm.example.com")
    return name


def _collector(text: str) -> str:
    """The address of an OTLP collector."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port or parts.query or parts.fragment:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT of a collector")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no credentials: a collector of the region takes what the region sends")
    return text.rstrip("/")


def arn_region(text: str) -> str:
    """`arn:PARTITION:SERVICE:REGION:…` → REGION; "" of anything else."""
    return text.split(":")[3] if text.startswith("arn:") and text.count(":") >= 5 else ""


HostPort = Annotated[str, AfterValidator(_address)]
Name = Annotated[str, AfterValidator(_name)]
Network = Annotated[str, AfterValidator(_network)]
Domain = Annotated[str, AfterValidator(_domain)]
Collector = Annotated[str, AfterValidator(_collector)]


class Section(BaseModel):
    """Frozen, and without fields that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid")
