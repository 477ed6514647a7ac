"""Whose law holds where: ISO 3166 codes, of a country (DE) or a part of one (AE-DU), and EU. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Jurisdiction = Annotated[str, Field(pattern=r"^[A-Z]{2}(-[A-Z0-9]{1,3})?$")]
_EU = frozenset({
    "AT", "BE", "BG", "CY", "CZ", "DE", "DK", "EE", "ES", "FI", "FR", "GR", "HR", "HU",
    "IE", "IT", "LT", "LU", "LV", "MT", "NL", "PL", "PT", "RO", "SE", "SI", "SK",
})  # fmt: skip


def within(place: str | None, law: str | None) -> bool:
    """Whether what must stay under `law` does so at `place`. Where no law is named, any place will do."""
    if law is None:
        return True
    if place is None:
        return False
    return place == law or place.startswith(f"{law}-") or (law == "EU" and place.partition("-")[0] in _EU)
