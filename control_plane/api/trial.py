"""Tries an endpoint for an operator: a chat request passed to its gateway with a short-lived key made for that.

The key never leaves this process, so the page needs no word with any other origin.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from control_plane.api.operations import Actor
from control_plane.api.places import Places
from control_plane.domain import UNLIMITED, KeyScope, Role
from control_plane.errors import InvalidInput, StoreUnavailable, Unavailable
from control_plane.security.keys import make_key
from control_plane.security.secret import Secret
from control_plane.store import audit, endpoints, tenants
from control_plane.store.database import Store

PATH = "/admin/v1/endpoints/{name}/chat"
ROLE = Role.OPERATOR
_ROUTE = "/v1/chat/completions"
_KEY_SECONDS = 3600.0
_KEY_LEFT = 300.0
_MOST_KEYS = 256
_MOST_AT_ONCE = 32
_SILENCE_SECONDS = 600.0
_PASSED_ON = ("content-type", "retry-after", "x-request-id")
_FIELDS = frozenset({"messages", "max_tokens", "temperature", "top_p", "seed", "stop"})


@dataclass(frozen=True, slots=True)
class _Key:
    text: str
    expires_at: float


class Trials:
    """Gateways are trusted by the installation's authority, at `ca_file`, or by the system's."""

    def __init__(
        self,
        store: Store,
        secret: Secret,
        places: Places,
        seal: audit.Seal,
        ca_file: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._secret = secret
        self._places = places
        self._seal = seal
        self._ca_file = ca_file
        self._clock = clock
        self._keys: dict[tuple[str, str], _Key] = {}
        self._open = asyncio.Semaphore(_MOST_AT_ONCE)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENCE_SECONDS)
        )

    async def close(self) -> None:
        await self._session.close()

    async def chat(self, request: web.Request, actor: Actor, request_id: str) -> web.StreamResponse:
        """Stream a reply, as the gateway gives it. Raises NotFound, InvalidInput, StoreUnavailable, Unavailable."""
        body = await _asked(request)
        if self._open.locked():
            raise StoreUnavailable("too many trials are open; try again soon", code="overloaded", retry_after=5)
        async with self._open:
            name = request.match_info["name"]
            for last in (False, True):
                url, key = await self._place(name, actor, request_id)
                response = await self._pass_on(request, f"{url}/e/{name}{_ROUTE}", key, {**body, "model": name}, last)
                if response is not None:
                    return response
                self._keys = {who: kept for who, kept in self._keys.items() if kept.text != key}
        raise Unavailable("the gateway doesn't take the key made for this trial; try again soon")

    async def _pass_on(
        self, request: web.Request, url: str, key: str, body: dict[str, Any], last: bool
    ) -> web.StreamResponse | None:
        """None where the key was revoked meanwhile, unless this is the `last` attempt."""
        # comments come while it is held, so that a page that was closed is noticed then too
        headers = {"Authorization": f"Bearer {key}", "x-ingle-keepalive": "2"}
        response = None
        try:
            async with self._session.post(url, json=body, headers=headers, ssl=self._context()) as answer:
                if answer.status == 401 and not last:
                    return None
                passed = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
                response = web.StreamResponse(status=answer.status, headers={**passed, "Cache-Control": "no-store"})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
        except ConnectionResetError:
            if response is None:
                raise Unavailable(f"the gateway at {url} broke off") from None
            return response  # the page was left: the gateway is told by the closed connection
        except (aiohttp.ClientError, TimeoutError) as error:
            fault = Unavailable(f"the gateway at {url} doesn't answer ({type(error).__name__})")
            if response is None:
                raise fault from None
            await response.write(f"data: {json.dumps(fault.body())}\n\n".encode())
        await response.write_eof()
        return response

    async def _place(self, name: str, actor: Actor, request_id: str) -> tuple[str, str]:
        """The URL of the endpoint's gateway, and a key for that endpoint alone."""
        now = self._clock()
        async with self._store.read() as session:
            found = await endpoints.get_endpoint(session, name)
            url = (await self._places.urls(session))[found.region]
        kept = self._keys.get((actor.name, found.id))
        if kept is not None and kept.expires_at - now > _KEY_LEFT:
            return url, kept.text
        made = make_key(self._secret)
        expires_at = now + _KEY_SECONDS
        async with self._store.write() as session:
            await tenants.add_key(
                session,
                key_id=made.id,
                tenant_id=found.tenant_id,
                name=f"trial by {actor.name}"[:64],
                digest=made.digest,
                prefix=made.prefix,
                quota=UNLIMITED,
                scope=KeyScope(endpoints=(name,), routes=(_ROUTE,)),
                expires_at=expires_at,
                now=now,
            )
            await audit.add_audit(
                session,
                self._seal,
                at=now,
                actor=actor.name,
                role=actor.role,
                action="key.create",
                target=made.id,
                request_id=request_id,
                detail={"for": "trial", "endpoints": [name], "routes": [_ROUTE], "expires_in": _KEY_SECONDS},
            )
        self._keys = {who: key for who, key in self._keys.items() if key.expires_at > now}
        while len(self._keys) >= _MOST_KEYS:
            self._keys.pop(next(iter(self._keys)))
        self._keys[actor.name, found.id] = _Key(made.text, expires_at)
        return url, made.text

    def _context(self) -> ssl.SSLContext:
        # read anew, since the authority may have been followed by another one
        context = ssl.create_default_context()
        context.load_verify_locations(self._ca_file)
        return context


async def _asked(request: web.Request) -> dict[str, Any]:
    """The body to pass on. Whether its values are right is the replica's to say."""
    try:
        given = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise InvalidInput("the body isn't valid JSON", code="invalid_json") from None
    if not isinstance(given, dict):
        raise InvalidInput("the body must be a JSON object", code="invalid_json")
    for name in given:
        if name not in _FIELDS:
            raise InvalidInput(f"{name[:64]} isn't one of {', '.join(sorted(_FIELDS))}", param=name[:64])
    return {**given, "stream": True, "stream_options": {"include_usage": True}}
