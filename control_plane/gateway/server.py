"""The gateway of one region: a request's way through it, in order.

tls → authenticate → limit → activate → route → proxy → meter
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from control_plane.config import Limits, Timing
from control_plane.domain import UNLIMITED, Quota
from control_plane.errors import (
    Forbidden,
    IngleError,
    MethodNotAllowed,
    NotFound,
    ResidencyMismatch,
    StoreUnavailable,
)
from control_plane.gateway.activator import Activator, no_such_endpoint
from control_plane.gateway.authenticate import Authenticator, source_address
from control_plane.gateway.body import NO_HEAD, Head, keep_alive_of, model_of, read_body, read_head, wait_of
from control_plane.gateway.demand import DemandTracker
from control_plane.gateway.door import Door
from control_plane.gateway.exchange import Exchange
from control_plane.gateway.hosts import endpoint_of
from control_plane.gateway.limits import Bound, Limiter
from control_plane.gateway.meter import Meter, usage_event
from control_plane.gateway.proxy import Proxy, error_reply
from control_plane.gateway.quotas import Quotas
from control_plane.gateway.router import PREFIX_BYTES, prefix_of
from control_plane.gateway.snapshot import Key, Route, SnapshotKeeper
from control_plane.metering.prices import PriceBook, in_force
from control_plane.observe import metrics
from control_plane.observe.logs import event, trace_of
from control_plane.observe.tracing import Tracing
from control_plane.security.mesh import PLAIN, Link
from control_plane.security.secret import Secret
from control_plane.store import traffic
from control_plane.store.database import Store

_POSTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})
_MODELS = "/v1/models"
# what a replica says of no model in particular (`python -m data_plane.api.openapi`); a test holds it to that
_DOCUMENT = Path(__file__).with_name("openapi.json").read_bytes()
_BEAT_SECONDS = 5.0
_IDLE_SECONDS = 75.0
_BYTES_PER_TOKEN = 4
_FIRST_GUESS = 256
_DESCRIBED = "x-ratelimit-limit-requests"
_LEARN = 0.1
"""How much of the usual length of an endpoint's replies one more reply is."""


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
        trusted_proxies: Sequence[str] = (),
        link: Link = PLAIN,
        domain: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        folder = home / "gateway"
        self.region = region
        self.url = ""
        self.server = Door(
            self._handle,
            region=region,
            most=limits.max_connections,
            header_seconds=limits.header_seconds,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_IDLE_SECONDS,
        )
        self.keeper = SnapshotKeeper(store, secret, folder, region, poll=timing.snapshot_poll, clock=clock)
        self._store = store
        self._tracing = tracing
        self._metrics_token = secret.metrics_token()
        self._gateway_id = gateway_id
        self._limits = limits
        self._clock = clock
        self._started_at = clock()
        self._authenticator = Authenticator(self.keeper, secret, clock=clock, max_age=limits.snapshot_max_age)
        self._trusted_proxies = trusted_proxies
        self._domain = domain
        self._limiter = Limiter(limits.max_in_flight, limits.max_buffered_bytes)
        self._quotas = Quotas(
            store,
            self.keeper,
            self._limiter,
            gateway_id,
            per_minute=(limits.key_requests_per_minute, limits.key_tokens_per_minute),
            interval=timing.demand_report,
            clock=clock,
        )
        self._usual: dict[str, float] = {}
        """Tokens of an endpoint's replies, by endpoint id."""
        self._counted: set[str] = set()
        """Names of the endpoints that metrics have series of."""
        self._demand = DemandTracker(store, gateway_id, region, interval=timing.demand_report, clock=clock)
        self._activator = Activator(
            self.keeper, self._demand, max_held=limits.max_held, max_bytes=limits.max_held_bytes, clock=clock
        )
        self._proxy = Proxy(
            self._activator,
            limits,
            region,
            secret.cache_salt,
            note=self._note,
            require_still=self._authenticator.require_still,
            link=link,
        )
        self._meter = Meter(store, folder, region, interval=timing.usage_flush, max_bytes=limits.max_spool_bytes)

    async def run(self) -> None:
        """Keep the snapshot fresh and report, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keeper.run())
            group.create_task(self._demand.run(self.keeper))
            group.create_task(self._meter.run())
            group.create_task(self._quotas.run())
            group.create_task(self._beat())

    async def close(self) -> None:
        """After the listener stopped: report a last time, write what is left."""
        await self._demand.report(self.keeper)
        with suppress(StoreUnavailable):
            await self._quotas.share()
        await self._proxy.close()
        await self._meter.close()

    async def announce(self) -> None:
        """Say where this gateway is, as far as the store can be reached."""
        with suppress(StoreUnavailable):
            async with self._store.write() as session:
                await traffic.beat(session, self._gateway_id, self.region, self.url, self._started_at, self._clock())

    async def _beat(self) -> None:
        while True:
            alive = {route.endpoint_id for route in self.keeper.current.routes.values()}
            self._usual = {name: usual for name, usual in self._usual.items() if name in alive}
            self._count_endpoints()
            metrics.snapshot_age.labels(self.region).set(self._clock() - self.keeper.checked_at)
            await self.announce()
            await asyncio.sleep(_BEAT_SECONDS)

    def _count_endpoints(self) -> None:
        """Let metrics have series of the endpoints that there are, and of no others."""
        names = {route.name for route in self.keeper.current.routes.values() if route.region == self.region}
        for name in names - self._counted:
            metrics.expect(self.region, name)
        for name in self._counted - names:
            metrics.forget(self.region, name)
        self._counted = names

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if not path.startswith(("/v1/", "/e/")):
            return self._own(request, path)
        span = self._tracing.server_span(
            self.region,
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
            self._describe_limits(exchange)
            return error_reply(error, exchange)
        except (asyncio.CancelledError, ConnectionError):
            exchange.outcome, exchange.error, exchange.status = "cancelled", "client_closed", 499
            raise
        except Exception as error:
            exchange.status, exchange.error = 500, "internal_error"
            metrics.refusals.labels(self.region, "internal_error").inc()
            trace_id = trace_of(exchange.span.carrier())
            event("gateway.fault", level=logging.ERROR, request=exchange.request_id, trace_id=trace_id, error=error)
            self._describe_limits(exchange)
            return error_reply(IngleError("the gateway failed to serve this request"), exchange)
        finally:
            self._settle(exchange)

    async def _answer(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        headers = request.headers
        source = source_address(request.remote, headers.getall("X-Forwarded-For", ()), self._trusted_proxies)
        key = exchange.key = await self._authenticator.check(headers.get("Authorization"), source)
        endpoint = endpoint_of(headers.get("Host"), self.region, self._domain)
        if endpoint is not None:
            exchange.override_model = True
        if exchange.path.startswith("/e/"):
            named, _, rest = exchange.path[3:].partition("/")
            if endpoint not in (None, named):
                raise no_such_endpoint(named[:100])
            endpoint = named
            exchange.path, exchange.override_model = f"/{rest}", True
        if exchange.path == _MODELS or exchange.path.startswith(f"{_MODELS}/"):
            _require_method(request, exchange, "GET")
            _require_route(key, _MODELS)
            self._describe_limits(exchange)
            return await self._models(key, exchange, endpoint)
        if exchange.path not in _POSTED:
            raise NotFound(f"Unknown request URL: {request.method} {request.path}", code="unknown_url")
        _require_method(request, exchange, "POST")
        _require_route(key, exchange.path)
        limits = self._limits
        own = self._bound(f"key:{key.id}", key.quota, "key")
        with self._limiter.place(), self._limiter.admit(*own), self._limiter.room() as take:
            body = await read_body(request, limits.max_body_bytes, limits.body_silence, take)
            head = read_head(body)
            if endpoint is None:
                endpoint = model_of(body, head)
            route = exchange.route = await self._route(key, endpoint)
            wait = wait_of(headers.get("x-ingle-wait"), route.max_wait)
            exchange.keep_alive = keep_alive_of(headers.get("x-ingle-keepalive"), head or NO_HEAD)
            with self._limiter.admit(*self._bounds(key, route)):
                await self._reserve(exchange, key, route, len(body), head or NO_HEAD)
                with self._demand.in_flight(route, exchange):
                    return await self._proxy.forward(request, exchange, route, key, body, wait)

    def _describe_limits(self, exchange: Exchange) -> None:
        """For a reply that nothing was reserved for."""
        if exchange.key is not None and exchange.reservation is None and _DESCRIBED not in exchange.headers:
            self._quotas.describe(exchange.key, exchange.headers)

    def _bounds(self, key: Key, route: Route) -> list[Bound]:
        tenant = self.keeper.current.tenants.get(key.tenant_id, UNLIMITED)
        return [
            *self._bound(f"tenant:{key.tenant_id}", tenant, "tenant"),
            *self._bound(f"endpoint:{route.endpoint_id}", route.quota, "endpoint"),
        ]

    def _bound(self, scope: str, quota: Quota, whose: str) -> list[Bound]:
        if quota.concurrency is not None:
            return [Bound(scope, quota.concurrency, True, whose)]
        return [Bound(scope, self._limits.key_concurrency, False, whose)] if whose == "key" else []

    async def _reserve(self, exchange: Exchange, key: Key, route: Route, size: int, head: Head) -> None:
        prompt = exchange.prompt_guess = math.ceil(size / _BYTES_PER_TOKEN)
        completion = head.completion(math.ceil(self._usual.get(route.endpoint_id, _FIRST_GUESS)))
        exchange.expected_tokens = prompt + completion
        exchange.prefix = prefix_of(head.beginning(PREFIX_BYTES))
        cost = self._book(exchange).tokens_nano(route.model, prompt, 0, completion)
        exchange.reservation = await self._quotas.reserve(key, route, prompt + completion, cost, exchange.headers)

    def _book(self, exchange: Exchange) -> PriceBook:
        return in_force(self.keeper.current.books, exchange.started_at)

    def _note(self, exchange: Exchange) -> None:
        """Journal a request that is under way."""
        outcome = "gateway_lost" if exchange.usage is None else "ok"
        usage = usage_event(exchange, self.region, self._book(exchange), outcome)
        if usage is not None:
            self._meter.begin(usage)

    async def _route(self, key: Key, endpoint: str) -> Route:
        """Raises NotFound, ResidencyMismatch; StoreUnavailable where it can't be known that there is none."""
        route = self._own_route(key, endpoint)
        if route is None:
            answered = await self.keeper.look_again()
            route = self._own_route(key, endpoint)
            if route is None and not answered:
                raise StoreUnavailable("the endpoint can't be looked up at the moment; try again soon", retry_after=2)
        if route is None:
            raise no_such_endpoint(endpoint[:100])
        if route.region != self.region:
            raise ResidencyMismatch(
                f"`{route.name}` lives in region {route.region} and answers only there; this is {self.region}.",
                param="model",
            )
        return route

    def _own_route(self, key: Key, endpoint: str) -> Route | None:
        route = self.keeper.current.routes.get(endpoint)
        if route is None or route.tenant_id != key.tenant_id or not _may_use(key, endpoint):
            return None
        return route

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
            if route.tenant_id == key.tenant_id
            and route.region == self.region
            and endpoint in (None, route.name)
            and _may_use(key, route.name)
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
        if path == "/openapi.json":
            return web.Response(body=_DOCUMENT, content_type="application/json")
        if path == "/metrics" and (_is_loopback(request.remote) or self._knows(request)):
            body, content_type = metrics.exposition(request.headers.get("Accept", ""))
            return web.Response(body=body, headers={"content-type": content_type})
        error = NotFound(f"Unknown request URL: {request.method} {path}", code="unknown_url")
        return web.json_response(error.body(), status=404)

    def _knows(self, request: web.BaseRequest) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self._metrics_token.encode())

    def _settle(self, exchange: Exchange) -> None:
        """Count, trace and meter what happened."""
        route, key, duration = exchange.route, exchange.key, exchange.elapsed()
        if exchange.outcome == "refused" and exchange.target is not None:
            exchange.outcome = "error"  # it went to a replica, and is in the ledger
        exchange.span.end(
            {"http.response.status_code": exchange.status, "ingle.request_id": exchange.request_id}
            | ({"ingle.endpoint": route.name} if route else {}),
            exchange.error,
        )
        if route is None or key is None:
            return
        metrics.requests.labels(self.region, route.name, str(exchange.status), exchange.outcome).inc()
        if exchange.status >= 500 or exchange.outcome == "upstream_lost":
            metrics.failed.labels(self.region, route.name).inc()
        exemplar = exchange.span.exemplar()
        metrics.request_duration.labels(self.region, route.name).observe(duration, exemplar)
        if exchange.streamed and exchange.first_byte is not None:
            metrics.time_to_first_token.labels(self.region, route.name).observe(exchange.first_byte, exemplar)
        usage = usage_event(exchange, self.region, self._book(exchange), exchange.outcome)
        if exchange.reservation is not None:
            tokens = usage.prompt_tokens + usage.completion_tokens if usage else 0
            exchange.reservation.settle(tokens, usage.cost_nano if usage else 0, self._clock())
        if usage is None:
            return  # it never went to a replica: nothing to bill
        self._meter.record(usage)
        for kind in ("prompt", "completion", "cached", "wasted"):
            metrics.tokens.labels(self.region, route.name, kind).inc(getattr(usage, f"{kind}_tokens"))
        if exchange.outcome == "ok":
            usual = self._usual.get(route.endpoint_id, float(usage.completion_tokens))
            self._usual[route.endpoint_id] = usual + _LEARN * (usage.completion_tokens - usual)


def _may_use(key: Key, endpoint: str) -> bool:
    return key.scope.endpoints is None or endpoint in key.scope.endpoints


def _require_route(key: Key, path: str) -> None:
    if key.scope.routes is not None and path not in key.scope.routes:
        raise Forbidden(f"this key may not use {path}")


def _require_method(request: web.BaseRequest, exchange: Exchange, method: str) -> None:
    if request.method != method:
        exchange.headers["allow"] = method
        raise MethodNotAllowed(f"{request.method} isn't for {request.path}: use {method}")


def _model_object(route: Route) -> dict[str, Any]:
    return {"id": route.name, "object": "model", "created": int(route.created_at), "owned_by": route.tenant_id}


def _is_loopback(remote: str | None) -> bool:
    try:
        return ipaddress.ip_address(remote or "").is_loopback
    except ValueError:
        return False
