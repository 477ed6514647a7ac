"""Answers an ACME authority's HTTP-01 questions, in plain HTTP and nothing else."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from control_plane.domain import Address
from control_plane.errors import ConfigError

_PATH = "/.well-known/acme-challenge/"
_IDLE_SECONDS = 10.0


class ChallengeResponder:
    """Serves the files in `folder` at `address`, which tells the real port once started."""

    def __init__(self, folder: Path, address: Address) -> None:
        self._folder = folder
        self.address = address
        server = web.Server(self._answer, access_log=None, keepalive_timeout=_IDLE_SECONDS)
        self._runner = web.ServerRunner(server)

    async def start(self) -> None:
        """Raises ConfigError where the address can't be had."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.address.host, self.address.port).start()
        except OSError as error:
            raise ConfigError(
                f"can't listen at {self.address} for ACME challenges ({error.strerror}): choose another acme.http",
                code="cannot_listen",
                param="acme.http",
            ) from None
        self.address = Address(self.address.host, self._runner.addresses[0][1])

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        token = request.path.removeprefix(_PATH)
        if request.path.startswith(_PATH) and token.replace("-", "").replace("_", "").isalnum():
            path = self._folder / token
            if path.is_file():
                return web.Response(body=path.read_bytes(), content_type="application/octet-stream")
        return web.Response(status=404)
