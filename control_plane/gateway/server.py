"""The gateway of one region: a request's way through it, in order.

tls → authenticate → limit → activate → route → proxy → meter
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from control_plane.config import Limits, Timing
from control_plane.domain import UsageEvent
from control_plane.errors import (
    IngleError,
    InvalidInput,
    MethodNotAllowed,
    NotFound,
    ResidencyMismatch,
    StoreUnavailable,
    TooLarge,
)
from control_plane.gateway.activator import Activator, no_such_endpoint
from control_plane.gateway.authenticate import Authenticator
from control_plane.gateway.demand import DemandTracker
from control_plane.gateway.exchange import Exchange
from control_plane.gateway.limits import Limiter
from control_plane.gateway.meter import Meter
from control_plane.gateway.proxy import Proxy, error_reply
from control_plane.gateway.snapshot import Key, Route, SnapshotKeeper
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.observe.tracing import Tracing
from control_plane.security.secret import Secret
from control_plane.store import traffic
from control_plane.store.database import Store

_POSTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})
_MODELS = "/v1/models"
_BEAT_SECONDS = 5.0
_IDLE_SECONDS = 75.0


class _Head(msgspec.Struct):
    """All that the gateway reads of a body."""

    model: Any = None


_decode_head = msgspec.json.Decoder(_Head).decode


class Gateway:
    """Answers tenants in `region`. `server` is to be put behind a TLS listener; `run` keeps it informed."""

    def __init__(
        self,
        store: Store,
        secret: Secret,
        tracing: Tracing,
        *,
        home: Path,
        region: str,
        gateway_id: str,
        limits: Limits,
        timing: Timing,
        clock: Callable[[], float] = time.time,
    ) -> None:
        folder = home / "gateway"
        self.region = region
        self.url = ""
        self.server = web.Server(
            self._handle, handler_cancellation=True, access_log=None, keepalive_timeout=_IDLE_SECONDS
        )
        self.keeper = SnapshotKeeper(store, secret, folder, region, poll=timing.snapshot_poll, clock=clock)
        self._store = store
        self._tracing = tracing
        self._gateway_id = gateway_id
        self._limits = limits
        self._clock = clock
        self._started_at = clock()
        self._authenticator = Authenticator(self.keeper, secret, clock=clock, max_age=limits.snapshot_max_age)
        self._limiter = Limiter(limits.key_concurrency, limits.max_in_flight, limits.max_buffered_bytes)
        self._demand = DemandTracker(store, gateway_id, region, interval=timing.demand_report, clock=clock)
        self._activator = Activator(self.keeper, self._demand, max_held=limits.max_held, clock=clock)
        self._proxy = Proxy(self._activator, limits, region, secret.cache_salt)
        self._meter = Meter(store, folder, region, interval=timing.usage_flush, max_bytes=limits.max_spool_bytes)

    async def run(self) -> None:
        """Keep the snapshot fresh and report, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keeper.run())
            group.create_task(self._demand.run(self.keeper))
            group.create_task(self._meter.run())
            group.create_task(self._beat())

    async def close(self) -> None:
        """After the listener stopped: report a last time, write what is left."""
        await self._demand.report(self.keeper)
        await self._proxy.close()
        await self._meter.close()

    async def _beat(self) -> None:
        while True:
            metrics.snapshot_age.labels(self.region).set(self._clock() - self.keeper.checked_at)
            with suppress(StoreUnavailable):
                async with self._store.write() as session:
                    await traffic.beat(
                        session, self._gateway_id, self.region, self.url, self._started_at, self._clock()
                    )
            await asyncio.sleep(_BEAT_SECONDS)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if not path.startswith(("/v1/", "/e/")):
            return self._own(request, path)
        span = self._tracing.server_span(
            f"{request.method} {path if path.startswith('/v1/') else '/e/'}",
            request.headers,
            {"http.request.method": request.method, "ingle.region": self.region},
        )
        exchange = Exchange(path, span)
        try:
            response = await self._answer(request, exchange)
            exchange.status = response.status
            return response
        except IngleError as error:
            exchange.status, exchange.error = error.status, error.code
            metrics.refusals.labels(self.region, error.code).inc()
            return error_reply(error, exchange)
        except (asyncio.CancelledError, ConnectionError):
            exchange.outcome, exchange.error, exchange.status = "cancelled", "client_closed", 499
            raise
        except Exception as error:
            exchange.status, exchange.error = 500, "internal_error"
            metrics.refusals.labels(self.region, "internal_error").inc()
            event("gateway.fault", level=logging.ERROR, request=exchange.request_id, error=error)
            return error_reply(IngleError("the gateway failed to serve this request"), exchange)
        finally:
            self._settle(exchange)

    async def _answer(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        key = exchange.key = await self._authenticator.check(request.headers.get("Authorization"))
        endpoint = None
        if exchange.path.startswith("/e/"):
            endpoint, _, rest = exchange.path[3:].partition("/")
            exchange.path, exchange.override_model = f"/{rest}", True
        if exchange.path == _MODELS or exchange.path.startswith(f"{_MODELS}/"):
            _require_method(request, exchange, "GET")
            return await self._models(key, exchange, endpoint)
        if exchange.path not in _POSTED:
            raise NotFound(f"Unknown request URL: {request.method} {request.path}", code="unknown_url")
        _require_method(request, exchange, "POST")
        with self._limiter.admit(key, exchange.headers), self._limiter.room() as take:
            body = await self._read(request, take)
            if endpoint is None:
                endpoint = _model_of(body)
            route = exchange.route = await self._route(key, endpoint)
            wait = _wait(request.headers.get("x-ingle-wait"), route)
            with self._demand.in_flight(route):
                return await self._proxy.forward(request, exchange, route, key, body, wait)

    async def _route(self, key: Key, endpoint: str) -> Route:
        """Raises NotFound, ResidencyMismatch; StoreUnavailable where it can't be known that there is none."""
        route = self._own_route(key, endpoint)
        if route is None:
            await self.keeper.look_again()
            route = self._own_route(key, endpoint)
        if route is None:
            if not self.keeper.healthy:
                raise StoreUnavailable("the endpoint can't be looked up at the moment; try again soon", retry_after=2)
            raise no_such_endpoint(endpoint[:100])
        if route.region != self.region:
            raise ResidencyMismatch(
                f"`{route.name}` lives in region {route.region} and answers only there; this is {self.region}.",
                param="model",
            )
        return route

    def _own_route(self, key: Key, endpoint: str) -> Route | None:
        route = self.keeper.current.routes.get(endpoint)
        return route if route is not None and route.tenant_id == key.tenant_id else None

    async def _read(self, request: web.BaseRequest, take: Callable[[int], None]) -> bytes:
        limit = self._limits.max_body_bytes
        too_large = TooLarge(f"the request's body is larger than {limit} bytes")
        if (request.content_length or 0) > limit:
            raise too_large
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        async for chunk in request.content.iter_any():
            take(len(chunk))
            body += chunk
            if len(body) > limit:
                raise too_large
        return bytes(body)

    async def _models(self, key: Key, exchange: Exchange, endpoint: str | None) -> web.Response:
        exchange.outcome = "ok"
        name = exchange.path[len(_MODELS) + 1 :]
        if name:
            route = await self._route(key, name)
            return web.json_response(_model_object(route), headers=exchange.headers)
        if endpoint is not None:
            await self._route(key, endpoint)
        routes = [
            route
            for route in self.keeper.current.routes.values()
            if route.tenant_id == key.tenant_id and route.region == self.region and endpoint in (None, route.name)
        ]
        return web.json_response(
            {"object": "list", "data": [_model_object(route) for route in routes]}, headers=exchange.headers
        )

    def _own(self, request: web.BaseRequest, path: str) -> web.Response:
        if path in ("/livez", "/healthz"):
            return web.json_response({"status": "ok", "region": self.region})
        if path == "/readyz":
            age = round(self._clock() - self.keeper.checked_at, 1)
            status = "ok" if self.keeper.healthy else "degraded"
            code = 200 if self.keeper.healthy else 503
            return web.json_response({"status": status, "snapshot_age_s": age}, status=code)
        if path == "/metrics" and _is_loopback(request.remote):
            return web.Response(body=metrics.exposition(), headers={"content-type": metrics.CONTENT_TYPE})
        error = NotFound(f"Unknown request URL: {request.method} {path}", code="unknown_url")
        return web.json_response(error.body(), status=404)

    def _settle(self, exchange: Exchange) -> None:
        """Count, trace and meter what happened."""
        route, key, usage = exchange.route, exchange.key, exchange.usage
        duration = exchange.elapsed()
        exchange.span.end(
            {"http.response.status_code": exchange.status, "ingle.request_id": exchange.request_id}
            | ({"ingle.endpoint": route.name} if route else {}),
            exchange.error,
        )
        if route is None or key is None:
            return
        metrics.requests.labels(self.region, route.name, str(exchange.status), exchange.outcome).inc()
        metrics.request_duration.labels(self.region, route.name).observe(duration)
        if exchange.streamed and exchange.first_byte is not None:
            metrics.time_to_first_token.labels(self.region, route.name).observe(exchange.first_byte)
        if usage is not None:
            for kind in ("prompt", "completion", "cached"):
                metrics.tokens.labels(self.region, route.name, kind).inc(getattr(usage, f"{kind}_tokens"))
        if exchange.target is None:
            return  # it never reached a replica: nothing to bill
        self._meter.record(
            UsageEvent(
                request_id=exchange.request_id,
                tenant_id=route.tenant_id,
                key_id=key.id,
                endpoint_id=route.endpoint_id,
                endpoint_name=route.name,
                replica_id=exchange.target.id,
                region=self.region,
                route=exchange.path,
                started_at=exchange.started_at,
                duration_ms=round(duration * 1000, 3),
                ttft_ms=None if exchange.first_byte is None else round(exchange.first_byte * 1000, 3),
                held_ms=round(exchange.held * 1000, 3),
                status=exchange.status,
                outcome=exchange.outcome,
                streamed=exchange.streamed,
                prompt_tokens=usage.prompt_tokens if usage else 0,
                completion_tokens=usage.completion_tokens if usage else 0,
                cached_tokens=usage.cached_tokens if usage else 0,
            )
        )


def _require_method(request: web.BaseRequest, exchange: Exchange, method: str) -> None:
    if request.method != method:
        exchange.headers["allow"] = method
        raise MethodNotAllowed(f"{request.method} isn't for {request.path}: use {method}")


def _model_of(body: bytes) -> str:
    """The endpoint that a body names. Raises InvalidInput."""
    try:
        model = _decode_head(body).model
    except msgspec.DecodeError:
        # Python's parser takes NaN and Infinity too: the replica then says which parameter holds one.
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            raise InvalidInput("the request's body isn't valid JSON", code="invalid_json") from None
        if not isinstance(parsed, dict):
            raise InvalidInput("the request's body must be a JSON object", code="invalid_json") from None
        model = parsed.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidInput("you must provide a model parameter", code="missing_required_parameter", param="model")
    return model


def _wait(text: str | None, route: Route) -> float:
    """Seconds to hold at most: the endpoint's own bound, or less if the client says so. Raises InvalidInput."""
    if text is None:
        return route.max_wait
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidInput("x-ingle-wait must be a number of seconds, 0 or more", param="x-ingle-wait")
    return min(seconds, route.max_wait)


def _model_object(route: Route) -> dict[str, Any]:
    return {"id": route.name, "object": "model", "created": int(route.created_at), "owned_by": route.tenant_id}


def _is_loopback(remote: str | None) -> bool:
    try:
        return ipaddress.ip_address(remote or "").is_loopback
    except ValueError:
        return False
