"""`/metrics` over plain HTTP, for a role that has no listener of its own, or a Prometheus that shall have one."""

from __future__ import annotations

from aiohttp import web

from control_plane.domain import Address
from control_plane.errors import ConfigError
from control_plane.observe import metrics


class Exporter:
    """Listens at `address`, whose real port is known once it started."""

    def __init__(self, address: Address) -> None:
        self.address = address
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Raises ConfigError where the address can't be had."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.address.host, self.address.port).start()
        except OSError as error:
            raise ConfigError(f"can't listen at {self.address} ({error.strerror})", param="metrics") from None
        self.address = Address(self.address.host, self._runner.addresses[0][1])

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})
