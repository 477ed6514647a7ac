"""Asks a replica how it is, whether it generates, and to rest or to wake.

`GET /health` is 200 only while its steps make progress, or while it rests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from control_plane.domain import Address, Rung
from control_plane.errors import ProviderError
from control_plane.security.mesh import PLAIN, Link

_PROOF_SECONDS = 60.0
_MOVE_SECONDS = 5.0
_PROOFS = (
    ("/v1/completions", {"prompt": "One, two,", "max_tokens": 1, "temperature": 0}),
    ("/v1/embeddings", {"input": "One, two,"}),
)
"""What any model answers one of."""


@dataclass(frozen=True, slots=True)
class Health:
    healthy: bool
    busy: int | None
    """Requests running and waiting there, if it said."""
    rung: Rung = Rung.HOT
    wake_phases: Mapping[str, float] = field(default_factory=dict)


class Prober:
    """Keeps connections to replicas; `timeout` bounds each question, in seconds. `token` is by replica id."""

    def __init__(self, timeout: float, link: Link = PLAIN, token: Callable[[str], str] = lambda _: "") -> None:
        self._link = link
        self._token = token
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout), connector=aiohttp.TCPConnector(limit=64)
        )

    async def ask(self, replica_id: str, address: Address) -> Health:
        try:
            async with self._session.get(
                self._link.url(address, "/health"), **self._link.options(replica_id)
            ) as response:
                body = await response.json(content_type=None)
                return _health(response.status == 200, body)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return Health(False, None)

    async def prove(self, replica_id: str, address: Address, model: str) -> str:
        """Have it generate. Returns what went wrong, or an empty string."""
        said = ""
        for path, body in _PROOFS:
            try:
                status, code = await self._post(replica_id, address, path, {"model": model, **body}, _PROOF_SECONDS)
            except (aiohttp.ClientError, TimeoutError) as error:
                return f"{path}: {type(error).__name__}"
            if status == 200:
                return ""
            said = said or f"{path} is answered with {status} {code}"
            if status >= 500:
                break
        return said

    async def rest(self, replica_id: str, address: Address, rung: Rung) -> None:
        """Have it go to `rung`. Raises ProviderError; repeating is safe."""
        await self._move(replica_id, address, "/sleep", {"rung": rung})

    async def wake(self, replica_id: str, address: Address) -> None:
        """Have it serve again; returns once it does, or after a while. Raises ProviderError; repeating is safe."""
        await self._move(replica_id, address, "/wake", {})

    async def _move(self, replica_id: str, address: Address, path: str, body: Mapping[str, Any]) -> None:
        try:
            status, code = await self._post(replica_id, address, path, body, _MOVE_SECONDS)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ProviderError(f"{path} failed ({type(error).__name__})", code="warmth_failed") from error
        if status >= 400:
            raise ProviderError(f"{path} was answered with {status} {code}", code="warmth_failed")

    async def _post(
        self, replica_id: str, address: Address, path: str, body: Mapping[str, Any], seconds: float
    ) -> tuple[int, str]:
        """Status, and the code of an error."""
        async with self._session.post(
            self._link.url(address, path),
            json=body,
            headers={"Authorization": f"Bearer {self._token(replica_id)}"},
            timeout=aiohttp.ClientTimeout(total=seconds),
            **self._link.options(replica_id),
        ) as response:
            return response.status, _code(await response.content.read(4096)) if response.status >= 400 else ""

    async def close(self) -> None:
        await self._session.close()


def _code(body: bytes) -> str:
    """The code of an error, of such characters only as a code has."""
    _, found, rest = body.partition(b'"code"')
    value = rest.partition(b'"')[2].partition(b'"')[0] if found else b""
    text = value.decode("ascii", "replace")
    return text if text.isidentifier() and len(text) <= 64 else ""


def _health(healthy: bool, body: Any) -> Health:
    if not isinstance(body, dict):
        return Health(healthy, None)
    running, waiting = body.get("running"), body.get("waiting")
    busy = running + waiting if isinstance(running, int) and isinstance(waiting, int) else None
    said, phases = body.get("rung"), body.get("wake_phases")
    rung = Rung(said) if said in list(Rung) else Rung.HOT
    numbers = (
        {str(k): float(v) for k, v in phases.items() if isinstance(v, int | float)} if isinstance(phases, dict) else {}
    )
    return Health(healthy, busy, rung, numbers)
