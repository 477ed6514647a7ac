"""Regions, and where each one's gateway is reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.config import Settings
from control_plane.domain import Offer, lack_of_accelerators
from control_plane.errors import IngleError, Unprocessable
from control_plane.store import traffic

_LOOK_SECONDS = 5.0
_FRESH_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Sight:
    """What a region's provider said when asked last. `accelerators` has the most of each that a replica may have, and
    never has more where it is `fixed`."""

    reachable: bool
    trouble: str | None = None
    accelerators: Mapping[str, int] = field(default_factory=dict)
    fixed: bool = False


class Places:
    """`offers` is the providers', handed in: the API knows no provider."""

    def __init__(
        self,
        settings: Settings,
        offers: Callable[[str], Awaitable[Sequence[Offer]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._offers = offers
        self._clock = clock
        self._seen: dict[str, tuple[float, Sight]] = {}

    @property
    def names(self) -> list[str]:
        return [region.name for region in self._settings.regions]

    def provider(self, region: str) -> str:
        found = self._settings.region(region)
        return found.provider if found else ""

    def jurisdiction(self, region: str) -> str | None:
        found = self._settings.region(region)
        return found.jurisdiction if found else None

    async def look(self, region: str) -> Sight:
        """Ask the region's provider what it offers; within bounds, and not again and again."""
        at, sight = self._seen.get(region, (float("-inf"), Sight(False)))
        if self._clock() - at > _FRESH_SECONDS:
            sight = await self._ask(region)
            self._seen[region] = (self._clock(), sight)
        return sight

    async def _ask(self, region: str) -> Sight:
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                offers = await self._offers(region)
        except TimeoutError:
            return Sight(False, f"no answer in {_LOOK_SECONDS:g} s")
        except IngleError as error:
            return Sight(False, error.message)
        return Sight(
            True,
            None if offers else "it has nothing that a replica could run on",
            {offer.accelerator: offer.max_per_replica for offer in offers},
            fixed=bool(offers) and all(offer.fixed for offer in offers),
        )

    def require(self, region: str) -> None:
        """Raises Unprocessable unless there is such a region: nothing falls back to another one."""
        if region not in self.names:
            raise Unprocessable(
                f"there is no region {region!r}; choose one of {', '.join(self.names)}",
                code="unknown_region",
                param="region",
            )

    async def require_offer(self, region: str, gpu: str | None, gpus: int) -> None:
        """Raises Unprocessable where the region's provider answers, and never has such accelerators."""
        sight = await self.look(region) if gpu is not None else None
        if sight is None or not sight.fixed:
            return
        lack = lack_of_accelerators(region, sight.accelerators, gpu, gpus)
        if lack is not None:
            raise Unprocessable(lack, code="accelerator_not_offered", param="gpu")

    async def urls(self, session: AsyncSession) -> dict[str, str]:
        """By region: its public URL if it has one, else the gateway heard from last, else the configured address."""
        reported = await traffic.gateway_urls(session)
        urls = {}
        for region in self._settings.regions:
            seen = reported.get(region.name)
            default = seen[0] if seen else f"https://{self._settings.gateway_address(region.name)}"
            urls[region.name] = region.public_url or default
        # Endpoints may stand in regions that were taken out of the settings since.
        return urls | {name: url for name, (url, _) in reported.items() if name not in urls}

    def endpoint_url(self, gateway: str, region: str, name: str) -> str:
        """The base URL that is one endpoint's own: its host name where endpoints have such, else a path."""
        domain = self._settings.domain
        if domain is None or not gateway:
            return f"{gateway}/e/{name}/v1"
        port = urlsplit(gateway).port
        return f"https://{name}.{region}.{domain}{f':{port}' if port not in (None, 443) else ''}/v1"
