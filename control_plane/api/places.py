"""Regions, and where each one's gateway is reached."""

from __future__ import annotations

from urllib.parse import urlsplit

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.config import Settings
from control_plane.errors import Unprocessable
from control_plane.store import traffic


class Places:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def names(self) -> list[str]:
        return [region.name for region in self._settings.regions]

    def provider(self, region: str) -> str:
        found = self._settings.region(region)
        return found.provider if found else ""

    def require(self, region: str) -> None:
        """Raises Unprocessable unless there is such a region: nothing falls back to another one."""
        if region not in self.names:
            raise Unprocessable(
                f"there is no region {region!r}; choose one of {', '.join(self.names)}",
                code="unknown_region",
                param="region",
            )

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
