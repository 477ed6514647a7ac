"""The admin API over HTTP: who may call, what a body must be, how an answer looks."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from control_plane.api import trial, views
from control_plane.api.idempotency import Once, fingerprint
from control_plane.api.live import LiveOperations
from control_plane.api.openapi import LINES, openapi
from control_plane.api.operations import Actor, Answer, Call, Lines, Operation, number_of
from control_plane.api.trial import Trials
from control_plane.config import describe_validation
from control_plane.dashboard import add_pages
from control_plane.domain import Role
from control_plane.errors import (
    Forbidden,
    IngleError,
    InvalidInput,
    MethodNotAllowed,
    NotFound,
    StoreUnavailable,
    TooLarge,
    Unauthenticated,
    Unprocessable,
)
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.security.audit import AuditSigner
from control_plane.security.secret import Secret
from control_plane.store import endpoints, tenants
from control_plane.store.database import Store

_MAX_BODY = 1024 * 1024
_EVENT_POLL_SECONDS = 1.0
_KEEPALIVE_SECONDS = 15.0
_LIVE_SECONDS = 2.0
_MAX_STREAMS = 64
_LINES_SECONDS = 6 * 3600.0
_IDLE_SECONDS = 75.0


class AdminApi:
    """`server` is to be put behind a TLS listener."""

    def __init__(
        self,
        store: Store,
        secret: Secret,
        operations: list[Operation],
        version: str,
        *,
        live: LiveOperations,
        trials: Trials,
        read_replicas: Callable[[], Awaitable[bytes]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._read_replicas = read_replicas
        self._secret = secret
        self._signer = AuditSigner(secret)
        self._live_operations = live
        self._trials = trials
        self._clock = clock
        self._streams = asyncio.Semaphore(_MAX_STREAMS)
        self._document = openapi(operations, version)
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard])
        for operation in operations:
            app.router.add_route(operation.method, operation.path, self._handler(operation))
        app.router.add_get("/admin/v1/events", self._events)
        app.router.add_post(trial.PATH, self._chat)
        app.router.add_get("/admin/openapi.json", self._openapi)
        add_pages(app)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/healthz", self._live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/metrics/replicas", self._replica_metrics)
        self.runner = web.AppRunner(app, access_log=None, keepalive_timeout=_IDLE_SECONDS)

    async def start(self) -> web.Server:
        await self.runner.setup()
        server = self.runner.server
        if server is None:
            raise RuntimeError("the runner has no server after its set-up")
        return server

    async def close(self) -> None:
        await self.runner.cleanup()
        await self._trials.close()
        await self._live_operations.close()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        request_id = f"req_{os.urandom(12).hex()}"
        request["id"] = request_id
        try:
            response = await handler(request)
        except IngleError as error:
            response = _error(error)
        except web.HTTPRequestEntityTooLarge:
            response = _error(TooLarge(f"the body is larger than {_MAX_BODY} bytes"))
        except web.HTTPMethodNotAllowed as error:
            response = _error(MethodNotAllowed(f"use {', '.join(sorted(error.allowed_methods))} for {request.path}"))
        except web.HTTPException as error:
            response = _error(NotFound(f"nothing at {request.path}: see /admin/openapi.json", code="unknown_url"))
            if error.status != 404:
                response.set_status(error.status)
        except Exception as error:
            event("api.fault", level=logging.ERROR, request=request_id, path=request.path, error=error)
            response = _error(IngleError("the admin API failed; its log says why"))
        if not response.prepared:
            response.headers["x-request-id"] = request_id
        return response

    def _handler(self, operation: Operation) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            actor = await self._actor(request, operation.role)
            raw = await _body(request) if operation.takes else {}
            body = None
            if operation.takes:
                try:
                    body = operation.takes.model_validate(raw)
                except ValidationError as error:
                    where = error.errors()[0]["loc"]
                    raise Unprocessable(
                        describe_validation(error), param=".".join(str(step) for step in where) or None
                    ) from None
            now = self._clock()
            key = request.headers.get("Idempotency-Key") if operation.idempotent else None
            if key is not None and not 1 <= len(key) <= 255:
                raise InvalidInput("Idempotency-Key must have 1 to 255 characters", param="Idempotency-Key")
            call = Call(
                actor=actor,
                request_id=request["id"],
                path=dict(request.match_info),
                query=request.query,
                body=body,
                given=frozenset(raw),
                if_generation=_if_match(request) if operation.conditional else None,
                seal=self._signer.seal,
                once=Once(actor.name, key, fingerprint(operation.id, raw), now),
                now=now,
            )
            answer = await operation.handler(call)
            if isinstance(answer, Answer):
                headers = {} if answer.generation is None else {"ETag": f'"{answer.generation}"'}
                return _json(answer.body.model_dump(mode="json"), answer.status, headers)
            if isinstance(answer, Lines):
                return await self._write_lines(request, answer)
            data = [item.model_dump(mode="json") for item in answer.items]
            return _json({"data": data, "next": answer.next}, operation.status, {})

        return handle

    async def _write_lines(self, request: web.Request, answer: Lines) -> web.StreamResponse:
        """Whoever reads an answer that ends before its time sees so: it has no end."""
        if self._streams.locked():
            raise StoreUnavailable("too many streams are open; try again soon", code="overloaded", retry_after=5)
        response = web.StreamResponse(headers={"content-type": LINES, "x-request-id": request["id"]})
        async with self._streams:
            await response.prepare(request)
            try:
                async with asyncio.timeout(_LINES_SECONDS), aclosing(answer.text) as text:
                    async for line in text:
                        await response.write(f"{line}\n".encode())
            except Exception as error:
                if not isinstance(error, ConnectionResetError):
                    event("api.fault", level=logging.ERROR, request=request["id"], path=request.path, error=error)
                if request.transport is not None:
                    request.transport.abort()
        return response

    async def _actor(self, request: web.Request, needed: Role) -> Actor:
        """Raises Unauthenticated, Forbidden, StoreUnavailable."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        digest = self._secret.admin_hash(token.strip())
        async with self._store.read() as session:
            row = await tenants.find_admin_token(session, digest)
        if row is None or scheme.lower() != "bearer":
            raise Unauthenticated(
                "a valid admin token is needed: `Authorization: Bearer …`", code="invalid_admin_token"
            )
        role = Role(row.role)
        if not role.includes(needed):
            raise Forbidden(f"this needs role {needed}; the token's role is {role}")
        return Actor(row.name, role)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """All endpoints' events as they happen; `Last-Event-ID` or `?after=` resumes.

        With `?live=NAME` also, as `live`, how that endpoint is.
        """
        await self._actor(request, Role.VIEWER)
        text = request.headers.get("Last-Event-ID") or request.query.get("after")
        async with self._store.read() as session:
            last = await endpoints.last_event_id(session)
        if text is not None:
            last = int(number_of({"after": text}, "after", 0, 0, 2**53))
        if self._streams.locked():
            raise StoreUnavailable("too many event streams are open; try again soon", code="overloaded", retry_after=5)
        async with self._streams:
            return await self._stream_events(request, last, request.query.get("live"))

    async def _stream_events(self, request: web.Request, last: int, live: str | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await response.prepare(request)
        with suppress(ConnectionResetError):  # whoever listened has left
            await self._tell(response, last, live)
        return response

    async def _tell(self, response: web.StreamResponse, last: int, live: str | None) -> None:
        spoke_at, live_at = self._clock(), 0.0
        while True:
            if live is not None and self._clock() - live_at >= _LIVE_SECONDS:
                live_at = spoke_at = self._clock()
                await response.write(await self._say_live(live, live_at))
            async with self._store.read() as session:
                rows = await endpoints.list_events(session, after=last, limit=200)
            for row in rows:
                last = row.id
                data = views.happening(row).model_dump_json()
                await response.write(f"id: {row.id}\nevent: {row.kind}\ndata: {data}\n\n".encode())
                spoke_at = self._clock()
            if self._clock() - spoke_at > _KEEPALIVE_SECONDS:
                await response.write(b": still here\n\n")
                spoke_at = self._clock()
            if not rows:
                await asyncio.sleep(_EVENT_POLL_SECONDS / 4)

    async def _say_live(self, name: str, now: float) -> bytes:
        try:
            (found,) = await self._live_operations.look(now, name)
        except NotFound:
            return b"event: gone\ndata: {}\n\n"
        return f"event: live\ndata: {found.model_dump_json()}\n\n".encode()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """Try an endpoint through its gateway, by a key made for that."""
        actor = await self._actor(request, trial.ROLE)
        return await self._trials.chat(request, actor, request["id"])

    async def _openapi(self, request: web.Request) -> web.Response:
        return _json(self._document, 200, {})

    async def _live(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"}, 200, {})

    async def _ready(self, request: web.Request) -> web.Response:
        async with self._store.read() as session:
            await endpoints.routes_revision(session)
        return _json({"status": "ok"}, 200, {})

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    async def _replica_metrics(self, request: web.Request) -> web.Response:
        if self._read_replicas is None:
            raise NotFound("this admin API reads no replicas' metrics", code="unknown_url")
        return web.Response(body=await self._read_replicas(), headers={"content-type": metrics.CONTENT_TYPE})


async def _body(request: web.Request) -> dict[str, Any]:
    text = await request.read()
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        raise InvalidInput("the body isn't valid JSON", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidInput("the body must be a JSON object", code="invalid_json")
    return value


def _if_match(request: web.Request) -> int | None:
    text = request.headers.get("If-Match")
    if text is None or text == "*":
        return None
    number = text.removeprefix("W/").strip('"')
    if not number.isdigit():
        raise InvalidInput("If-Match must be an ETag that this API gave", param="If-Match")
    return int(number)


def _json(body: Any, status: int, headers: dict[str, str]) -> web.Response:
    return web.json_response(body, status=status, headers=headers)


def _error(error: IngleError) -> web.Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(max(1, round(error.retry_after)))}
    return _json(error.body(), error.status, headers)
