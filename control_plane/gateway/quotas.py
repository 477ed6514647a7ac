"""Limits over time, shared by all gateways: reserve an estimate before a request, settle the actual after it.

The store gives a gateway its part of each window, so that together they never give out more than the limit. A gateway
may keep a hundredth of it unused. While the store is away each gateway keeps to the limit on its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from control_plane.domain import Quota
from control_plane.errors import RateLimited, StoreUnavailable
from control_plane.gateway.bucket import Bucket, Part
from control_plane.gateway.limits import Limiter
from control_plane.gateway.snapshot import Key, Route, SnapshotKeeper
from control_plane.metering.prices import NANO
from control_plane.observe.logs import event
from control_plane.store import limits
from control_plane.store.database import Store
from control_plane.store.limits import Kind

_PATIENCE = 1.0
"""Seconds that a request waits for the store's part of a limit before its gateway decides alone."""
_STALE = 15.0
_UNITS = {Kind.REQUESTS: "requests a minute", Kind.TOKENS: "tokens a minute", Kind.BUDGET: "of budget a month"}


class Reservation:
    """What one request took of its limits."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def settle(self, tokens: int, cost_nano: int, now: float) -> None:
        actual = {Kind.TOKENS: tokens, Kind.BUDGET: cost_nano}
        for part in self._parts:
            part.settle(actual.get(part.bucket.kind, part.amount), now)


class Quotas:
    """`per_minute` are the requests and tokens of a key that has no bounds of its own, on each gateway."""

    def __init__(
        self,
        store: Store,
        keeper: SnapshotKeeper,
        limiter: Limiter,
        gateway_id: str,
        *,
        per_minute: tuple[int, int],
        interval: float,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._keeper = keeper
        self._limiter = limiter
        self._gateway_id = gateway_id
        self._per_minute = per_minute
        self._interval = interval
        self._clock = clock
        self._buckets: dict[tuple[str, Kind], Bucket] = {}
        self._needs: dict[tuple[str, Kind], list[int]] = {}
        self._next_round: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def reserve(
        self, key: Key, route: Route, tokens: int, cost_nano: int, headers: dict[str, str]
    ) -> Reservation:
        """Take one request, `tokens` and `cost_nano` of all limits or of none. Raises RateLimited.

        An estimate beyond a whole limit counts as all of it.
        """
        amounts = {Kind.REQUESTS: 1, Kind.TOKENS: tokens, Kind.BUDGET: cost_nano}
        wanted = [(bucket, min(amounts[bucket.kind], bucket.limit)) for bucket in self._of(key, route)]
        now = self._clock()
        short = [(bucket, amount) for bucket, amount in wanted if not bucket.has(amount, now)]
        if short:
            await self._refill(short)
            now = self._clock()
            short = [(bucket, amount) for bucket, amount in wanted if not bucket.has(amount, now)]
        if not short:
            for bucket, amount in wanted:
                bucket.left -= amount
        buckets = [bucket for bucket, _ in wanted]
        _describe(buckets, headers, now)
        if short:
            bucket = max((bucket for bucket, _ in short), key=lambda one: one.ends_at)
            limit = f"{bucket.limit / NANO:g}" if bucket.kind is Kind.BUDGET else f"{bucket.limit:,}"
            wait = bucket.resets_in(now)
            raise RateLimited(
                f"this {bucket.whose} has {limit} {_UNITS[bucket.kind]}; try again in {wait} s", retry_after=wait
            )
        return Reservation([Part(bucket, amount, bucket.started_at) for bucket, amount in wanted])

    def describe(self, key: Key, headers: dict[str, str]) -> None:
        """Say in `headers` what is left, without taking anything."""
        _describe(self._of(key, None), headers, self._clock())

    async def run(self) -> None:
        """Settle with the store and with other gateways until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.share()
            except StoreUnavailable as error:
                event("gateway.limits_not_shared", level=logging.WARNING, reason=error.message)

    async def share(self) -> None:
        """Tell what is owed and not needed, and exchange open requests. Raises StoreUnavailable."""
        now = self._clock()
        told = []
        for at, bucket in list(self._buckets.items()):
            ask = bucket.give_back(now)
            if ask is not None:
                told.append((bucket, ask))
            elif now >= bucket.ends_at and bucket.left >= 0 and not bucket.touched:
                del self._buckets[at]
            bucket.touched = False
        counts = self._limiter.report()
        if not told and not counts:
            return
        try:
            async with self._store.write() as session:
                grants = await limits.give_out(session, [ask for _, ask in told], now)
                if counts:
                    await limits.report_open(session, self._gateway_id, counts, now)
                    self._limiter.hear(await limits.open_elsewhere(session, self._gateway_id, now - _STALE))
        except StoreUnavailable:
            for bucket, ask in told:
                bucket.untold(ask)
            raise
        for bucket, _ in told:
            bucket.adopt(grants[bucket.scope, bucket.kind])

    def _of(self, key: Key, route: Route | None) -> list[Bucket]:
        tenant = self._keeper.current.tenants.get(key.tenant_id)
        found = self._buckets_of(f"key:{key.id}", key.quota, "key", self._per_minute)
        if tenant is not None:
            found += self._buckets_of(f"tenant:{key.tenant_id}", tenant, "tenant", None)
        if route is not None:
            found += self._buckets_of(f"endpoint:{route.endpoint_id}", route.quota, "endpoint", None)
        return found

    def _buckets_of(self, scope: str, quota: Quota, whose: str, default: tuple[int, int] | None) -> list[Bucket]:
        budget = None if quota.monthly_budget is None else round(quota.monthly_budget * NANO)
        known = (
            (Kind.REQUESTS, quota.requests_per_minute, default and default[0]),
            (Kind.TOKENS, quota.tokens_per_minute, default and default[1]),
            (Kind.BUDGET, budget, None),
        )
        found = []
        for kind, own, otherwise in known:
            limit = own if own is not None else otherwise
            if limit is None:
                continue
            bucket = self._buckets.get((scope, kind))
            if bucket is None or bucket.limit != limit or bucket.shared != (own is not None):
                bucket = self._buckets[scope, kind] = Bucket(scope, kind, limit, own is not None, whose)
            bucket.touched = True
            found.append(bucket)
        return found

    async def _refill(self, short: Sequence[tuple[Bucket, int]]) -> None:
        """Get what is missing: all who come while the store is being asked share the next question."""
        now = self._clock()
        shared = False
        for bucket, amount in short:
            if not bucket.shared or not self._keeper.healthy:
                missing = max(1, amount - (max(0, bucket.left) if now < bucket.ends_at else 0))
                bucket.alone(missing, missing, now)
            else:
                shared = True
                self._needs.setdefault((bucket.scope, bucket.kind), []).append(amount)
        if shared:
            if self._next_round is None:
                self._next_round = asyncio.create_task(self._round())
            done, _ = await asyncio.wait({self._next_round}, timeout=_PATIENCE)
            now = self._clock()
            for bucket, amount in short:
                if bucket.shared and not done and not bucket.has(amount, now):
                    bucket.alone(amount, amount, now)

    async def _round(self) -> None:
        async with self._turn:
            self._next_round = None
            needs, self._needs = self._needs, {}
            now = self._clock()
            asked = []
            for at, amounts in needs.items():
                bucket = self._buckets.get(at)
                if bucket is not None:
                    spare = max(0, bucket.left) if now < bucket.ends_at else 0
                    asked.append((bucket, bucket.ask(max(1, sum(amounts) - spare), max(1, min(amounts) - spare))))
            try:
                async with self._store.write() as session:
                    grants = await limits.give_out(session, [ask for _, ask in asked], now)
            except StoreUnavailable:
                event("gateway.limits_kept_alone", level=logging.WARNING)
                for bucket, ask in asked:
                    bucket.untold(ask)
                    bucket.alone(ask.want, ask.least, now)
                return
            for bucket, _ in asked:
                bucket.adopt(grants[bucket.scope, bucket.kind])


def _describe(buckets: Sequence[Bucket], headers: dict[str, str], now: float) -> None:
    """The tightest limit of each kind."""
    for kind in (Kind.REQUESTS, Kind.TOKENS):
        tight = min((one for one in buckets if one.kind is kind), key=lambda one: one.remaining(now))
        headers[f"x-ratelimit-limit-{kind}"] = str(tight.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(tight.remaining(now))
        headers[f"x-ratelimit-reset-{kind}"] = f"{tight.resets_in(now)}s"
