"""Keeps gauges that only the database can tell: expiring keys, budgets, cost a second, faults of the audit chain."""

from __future__ import annotations

from control_plane.chain import BEFORE_ALL, Verifier
from control_plane.domain import Replica
from control_plane.metering.prices import NANO, in_force
from control_plane.observe import metrics
from control_plane.security.audit import AuditSigner
from control_plane.store import audit, endpoints, facts, prices, replicas
from control_plane.store.database import Store

_WEEK = 7 * 86_400.0
_PAGE = 500
_PAGES = 4
_WALK_AGAIN = 600.0


class Facts:
    """`look` reads a bounded part each time; a walk along the audit chain takes as many looks as it needs."""

    def __init__(self, store: Store, signer: AuditSigner) -> None:
        self._store = store
        self._signer = signer
        self._tenants: set[str] = set()
        self._verifier = Verifier(signer.signed)
        self._after = 0
        self._walk_at = 0.0
        self._head = BEFORE_ALL

    async def look(self, now: float) -> None:
        """Raises StoreUnavailable."""
        async with self._store.read() as session:
            metrics.keys_expiring.set(await facts.keys_expiring(session, now, _WEEK))
            budgets = await facts.budgets_used(session, now)
            book = in_force(await prices.list_books(session), now)
            known = await endpoints.list_endpoints(session)
            alive: dict[str, list[Replica]] = {}
            for replica in await replicas.live_replicas(session):
                alive.setdefault(replica.endpoint_id, []).append(replica)
        for gone in self._tenants - budgets.keys():
            metrics.budget_used.remove(gone)
        self._tenants = set(budgets)
        for tenant, share in budgets.items():
            metrics.budget_used.labels(tenant).set(share)
        for endpoint in known:
            hourly = book.hours_nano(endpoint.gpu, 1.0, endpoint.gpus) * len(alive.get(endpoint.id, ()))
            metrics.cost_per_second.labels(endpoint.region, endpoint.name).set(hourly / NANO / 3600)
        await self._walk(now)

    async def _walk(self, now: float) -> None:
        if now < self._walk_at:
            return
        for _ in range(_PAGES):
            async with self._store.read() as session:
                # the length first: records that are written meanwhile are no fault
                expected = await audit.chain_length(session)
                page = await audit.chain(session, after=self._after, limit=_PAGE)
            self._verifier.take(record for _, record in page)
            if len(page) == _PAGE:
                self._after = page[-1][0]
                continue
            self._verifier.end(expected)
            metrics.audit_faults.set(len(self._verifier.faults))
            # the head of this walk must still be there at the next one
            self._head = self._verifier.head if not self._verifier.faults else self._head
            self._verifier = Verifier(self._signer.signed, self._head)
            self._after, self._walk_at = 0, now + _WALK_AGAIN
            return
