"""Asks a replica how it is: `GET /health`, which is 200 only while its steps make progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from control_plane.domain import Address
from control_plane.security.mesh import PLAIN, Link


@dataclass(frozen=True, slots=True)
class Health:
    healthy: bool
    busy: int | None
    """Requests running and waiting there, if it said."""


class Prober:
    """Keeps connections to replicas; `timeout` bounds each question, in seconds."""

    def __init__(self, timeout: float, link: Link = PLAIN) -> None:
        self._link = link
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout), connector=aiohttp.TCPConnector(limit=64)
        )

    async def ask(self, replica_id: str, address: Address) -> Health:
        try:
            async with self._session.get(
                self._link.url(address, "/health"), **self._link.options(replica_id)
            ) as response:
                body = await response.json(content_type=None)
                return Health(response.status == 200, _busy(body))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return Health(False, None)

    async def close(self) -> None:
        await self._session.close()


def _busy(body: Any) -> int | None:
    if not isinstance(body, dict):
        return None
    running, waiting = body.get("running"), body.get("waiting")
    return running + waiting if isinstance(running, int) and isinstance(waiting, int) else None
