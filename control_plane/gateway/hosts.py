"""Endpoints as host names: `ENDPOINT.REGION.DOMAIN` is one endpoint's own, `REGION.DOMAIN` is its region's gateway."""

from __future__ import annotations

from control_plane.errors import NotFound, ResidencyMismatch


def host_names(region: str, domain: str | None) -> list[str]:
    """What the certificate of a region's gateway must cover."""
    return [f"{region}.{domain}", f"*.{region}.{domain}"] if domain else []


def endpoint_of(host: str | None, region: str, domain: str | None) -> str | None:
    """The endpoint that a Host header names; None where it names none, as an address does.

    Raises ResidencyMismatch for another region's name, NotFound for any other name under `domain`.
    """
    if domain is None or not host:
        return None
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.lower().rstrip(".")
    if name != domain and not name.endswith(f".{domain}"):
        return None
    labels = name.removesuffix(domain).rstrip(".").split(".")
    if len(labels) > 2 or labels == [""]:
        raise NotFound(f"no endpoint is called {name[:255]}", code="unknown_url")
    if labels[-1] != region:
        raise ResidencyMismatch(f"{name} isn't a name of region {region}: it is answered by its own gateways only")
    return labels[0] if len(labels) == 2 else None
