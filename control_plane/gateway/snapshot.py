"""What a gateway knows: keys and routes, in memory, refreshed from the store, kept on disk signed.

A request is served from here alone. While the store is away the last word stands, for a bounded time.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from control_plane.domain import ANYTHING, UNLIMITED, Endpoint, EndpointState, KeyScope, Quota, Replica, ReplicaState
from control_plane.errors import StoreUnavailable
from control_plane.gateway.router import Canary, Target
from control_plane.metering.prices import PriceBook
from control_plane.observe.logs import event
from control_plane.security.files import private_folder, write_private
from control_plane.security.secret import Secret
from control_plane.store import endpoints, generations, prices, replicas, tenants
from control_plane.store.database import Store

_LOOK_AGAIN_SECONDS = 0.1
_PATIENCE = 2.0
"""Seconds that a request waits for the store."""
_SILENCE = 4.0
_BOOKS = 20
"""Price books that a gateway knows: requests are priced by the one in force when they began."""


@dataclass(frozen=True, slots=True)
class Key:
    id: str
    tenant_id: str
    hash: str
    """Hexadecimal."""
    expires_at: float | None
    quota: Quota = UNLIMITED
    scope: KeyScope = ANYTHING


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint as a gateway needs it. `cold_start_ms` is None before the first measured start."""

    endpoint_id: str
    name: str
    tenant_id: str
    region: str
    created_at: float
    state: EndpointState
    reason_code: str | None
    reason: str
    max_wait: float
    cold_start_ms: float | None
    targets: tuple[Target, ...]
    model: str = ""
    quota: Quota = UNLIMITED
    canary: Canary | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    revision: int
    taken_at: float
    keys: Mapping[str, Key]
    routes: Mapping[str, Route]
    tenants: Mapping[str, Quota] = field(default_factory=dict)
    """Limits of the tenants that have any, by id."""
    books: tuple[PriceBook, ...] = ()


EMPTY = Snapshot(-1, 0.0, {}, {})


class SnapshotKeeper:
    """Holds the newest snapshot for one region's gateway.

    `listen` adds a function that is called after each change.
    """

    def __init__(
        self, store: Store, secret: Secret, folder: Path, region: str, *, poll: float, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._secret = secret
        self._path = private_folder(folder) / f"{region}.snapshot"
        self._region = region
        self._poll = poll
        self._clock = clock
        self._poke = store.subscribe("routes")
        self._listeners: list[Callable[[], None]] = []
        self._targets: dict[str, Target] = {}
        self._looking: asyncio.Task[bool] | None = None
        self._next_look: asyncio.Task[None] | None = None
        self._looked_again_at = 0.0
        self.current = EMPTY
        self.checked_at = 0.0
        self._answered = False
        self.hurry: Callable[[], bool] = lambda: False
        """Whether somebody waits for a change, so that looking more often is worth it."""

    @property
    def healthy(self) -> bool:
        """Whether the store answered when it was asked last, and that not long ago."""
        return self._answered and self._clock() - self.checked_at < max(_SILENCE, 3 * self._poll)

    def listen(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def start(self) -> None:
        """Have a first snapshot: from the store, or from disk if that is away."""
        if not await self.refresh():
            await asyncio.to_thread(self._restore)

    async def run(self) -> None:
        """Look whenever something changed, until cancelled."""
        while True:
            await self._poke.wait(self._poll / 5 if self.hurry() else self._poll)
            await self.refresh()

    async def refresh(self) -> bool:
        """Look at the store now; callers at the same time share one look. Returns whether it answered."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(self._looking)

    async def look_again(self) -> bool:
        """For a caller that misses something: look at the store, not earlier than now. Returns whether it answered.

        Whatever arrives, the store is asked ten times a second at most; all who come meanwhile share the next look.
        """
        if self._next_look is None:
            self._next_look = asyncio.create_task(self._later_look())
        done, _ = await asyncio.wait({self._next_look}, timeout=_PATIENCE)
        return bool(done) and self.healthy

    async def _later_look(self) -> None:
        await asyncio.sleep(max(0.0, self._looked_again_at + _LOOK_AGAIN_SECONDS - self._clock()))
        # Whoever comes from now on may miss something that this look doesn't see, and waits for the next one.
        self._next_look = None
        self._looked_again_at = self._clock()
        if self._looking is not None and not self._looking.done():
            await asyncio.shield(self._looking)
        await self.refresh()

    async def _look(self) -> bool:
        now = self._clock()
        try:
            async with self._store.read() as session:
                revision = await endpoints.routes_revision(session)
                if revision != self.current.revision:
                    data = {
                        "revision": revision,
                        "keys": [
                            asdict(Key(row.id, row.tenant_id, row.hash.hex(), row.expires_at, row.quota, row.scope))
                            for row in await tenants.usable_keys(session, now)
                        ],
                        "routes": _routes(
                            await endpoints.list_endpoints(session),
                            await replicas.live_replicas(session),
                            await endpoints.cold_start_estimates(session),
                            await generations.wake_estimates(session),
                        ),
                        "tenants": {
                            tenant_id: asdict(quota)
                            for tenant_id, quota in (await tenants.tenant_quotas(session)).items()
                        },
                        "books": [asdict(book) for book in await prices.list_books(session, _BOOKS)],
                    }
                else:
                    data = None
        except StoreUnavailable as error:
            if self._answered:
                event("gateway.store_unavailable", level=logging.WARNING, region=self._region, reason=error.message)
            self._answered = False
            return False
        if not self._answered:
            event("gateway.store_available", region=self._region)
        self._answered = True
        self.checked_at = now
        if data is not None:
            self._adopt(data, now)
            await asyncio.to_thread(self._keep, data, now)
        return True

    def _adopt(self, data: Mapping[str, Any], taken_at: float) -> None:
        routes = {}
        live: dict[str, Target] = {}
        for entry in data["routes"]:
            targets = []
            for replica_id, address in entry["targets"]:
                target = self._targets.get(replica_id)
                if target is None or target.address != address:
                    token = self._secret.replica_token(replica_id)
                    target = Target(replica_id, address, f"Bearer {token}")
                live[replica_id] = target
                targets.append(target)
            quota = Quota(**entry["quota"])
            state = EndpointState(entry["state"])
            tried = entry["canary"]
            canary = Canary(tried["percent"], frozenset(tried["ids"])) if tried else None
            route = Route(**{**entry, "state": state, "targets": tuple(targets), "quota": quota, "canary": canary})
            routes[route.name] = route
        self._targets = live
        keys = {entry["id"]: msgspec.convert(entry, Key) for entry in data["keys"]}
        quotas = {tenant_id: Quota(**quota) for tenant_id, quota in data["tenants"].items()}
        books = msgspec.convert(data["books"], tuple[PriceBook, ...])
        self.current = Snapshot(data["revision"], taken_at, keys, routes, quotas, books)
        for listener in self._listeners:
            listener()

    def _keep(self, data: Mapping[str, Any], taken_at: float) -> None:
        body = json.dumps({"taken_at": taken_at, **data}, sort_keys=True).encode()
        try:
            write_private(self._path, self._secret.sign(body).encode() + b"\n" + body)
        except OSError as error:
            event("gateway.snapshot_not_kept", level=logging.WARNING, region=self._region, reason=error.strerror)

    def _restore(self) -> None:
        try:
            signature, _, body = self._path.read_bytes().partition(b"\n")
        except OSError:
            return
        if not hmac.compare_digest(signature.decode("ascii", "replace"), self._secret.sign(body)):
            event("gateway.snapshot_refused", level=logging.ERROR, region=self._region, reason="its signature is wrong")
            return
        data = json.loads(body)
        taken_at = data.pop("taken_at")
        try:
            # Its revision is forgotten, so that the first word from the store replaces it.
            self._adopt({**data, "revision": -1}, taken_at)
        except (KeyError, TypeError, msgspec.ValidationError):
            event("gateway.snapshot_refused", level=logging.ERROR, region=self._region, reason="another version's")
            return
        self.checked_at = taken_at
        event("gateway.snapshot_restored", region=self._region, routes=len(self.current.routes))


def _routes(
    known: list[Endpoint],
    running: list[Replica],
    cold_starts: Mapping[str, float],
    wakes: Mapping[tuple[str, str], float],
) -> list[dict[str, Any]]:
    ready: dict[str, list[tuple[str, str]]] = {}
    for replica in running:
        if replica.state is ReplicaState.READY and replica.address is not None:
            ready.setdefault(replica.endpoint_id, []).append((replica.id, str(replica.address)))
    return [
        {
            "endpoint_id": endpoint.id,
            "name": endpoint.name,
            "tenant_id": endpoint.tenant_id,
            "region": endpoint.region,
            "created_at": endpoint.created_at,
            "state": str(endpoint.state),
            "reason_code": endpoint.reason_code,
            "reason": endpoint.reason,
            "max_wait": endpoint.max_wait,
            "cold_start_ms": wakes.get((endpoint.id, endpoint.warmth), cold_starts.get(endpoint.id)),
            "targets": ready.get(endpoint.id, []),
            "model": endpoint.model,
            "quota": asdict(endpoint.quota),
            "canary": _canary(endpoint, running),
        }
        for endpoint in known
        if not endpoint.deleting
    ]


def _canary(endpoint: Endpoint, running: list[Replica]) -> dict[str, Any] | None:
    if endpoint.canary is None or endpoint.proven:
        return None
    ids = [
        replica.id
        for replica in running
        if replica.endpoint_id == endpoint.id and replica.generation >= endpoint.runtime_generation
    ]
    return {"percent": endpoint.canary, "ids": ids}
