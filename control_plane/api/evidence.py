"""The operation that puts together what proves where an endpoint ran."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from control_plane import domain
from control_plane.api import schemas
from control_plane.api.operations import Answer, Call, Operation
from control_plane.config import Settings
from control_plane.domain import Phase, ReplicaState, Role
from control_plane.errors import IngleError
from control_plane.evidence import write
from control_plane.observe.exports import Export
from control_plane.observe.logs import iso, redact
from control_plane.security.audit import AuditSigner
from control_plane.store import endpoints, evidence, generations
from control_plane.store.database import Store
from control_plane.store.models import ReplicaRow

Describe = Callable[[str, str], Awaitable[domain.Description]]
"""Region and replica id → what the provider says of it now. Raises ProviderError, KeyError."""
_GENERATIONS = 100
_AT_ONCE = 16
_SECONDS = 10.0


class EvidenceOperations:
    """`describe` is the providers', handed in: the API knows none. Their word is believed over our own records."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        exports: Mapping[str, Export],
        signer: AuditSigner,
        describe: Describe,
    ) -> None:
        self._store = store
        self._settings = settings
        self._exports = exports
        self._signer = signer
        self._describe = describe

    def table(self) -> list[Operation]:
        return [
            Operation("showEvidence", "GET", "/admin/v1/endpoints/{name}/evidence", Role.OWNER,
                      "Where it ran, by which keys it was used, what was kept and deleted: chained and signed lines",
                      self.evidence, schemas.Evidence),
        ]  # fmt: skip

    async def evidence(self, call: Call) -> Answer:
        async with self._store.read() as session:
            found = await endpoints.get_endpoint(session, call.path["name"])
            rows = await evidence.replicas_of(session, found.id)
            asked = await generations.history(session, found.id, _GENERATIONS)
            traffic = await evidence.traffic_of(session, found.id)
            kept = await evidence.kept_of(session, found.id)
            deletions = await evidence.deletions_of(session, found.id)
            audited = await evidence.audit_of(session, found.name, found.created_at)
        slots = asyncio.Semaphore(_AT_ONCE)
        said = await asyncio.gather(*(self._ask(slots, row) for row in rows))
        records: list[Mapping[str, Any]] = [self._about(found, call.now)]
        records += [
            {"kind": "generation", "generation": one.generation, "at": iso(one.at), "outcome": one.outcome,
             "region": found.region, "model": one.spec["model"], "gpu": one.spec["gpu"]}
            for one in reversed(asked)
        ]  # fmt: skip
        if len(asked) == _GENERATIONS or len(rows) == evidence.MOST_REPLICAS:
            records.append({"kind": "cut", "generations": len(asked), "replicas": len(rows),
                            "what": "no more are told: the newest generations, the oldest replicas"})  # fmt: skip
        for row, word in zip(rows, said, strict=True):
            records += self._replica(found, row, word)
        records += [{"kind": "traffic", **entry, **_residency(found, entry["region"])} for entry in traffic]
        records.append(self._exported(found.region))
        records.append({"kind": "kept", "retention_seconds": found.retention, **kept})
        records += [{"kind": "deleted", "at": iso(row.at), "what": row.message} for row in deletions]
        records += [
            {"kind": "change", "at": iso(row.at), "actor": row.actor, "action": row.action, "audit_seq": row.seq,
             "audit_hash": row.hash}
            for row in audited
        ]  # fmt: skip
        async with self._store.write() as session:
            await call.audit(session, "endpoint.evidence", found.name, records=len(records) + 1)
        lines = await asyncio.to_thread(write, records, self._signer.seal)
        return Answer(schemas.Evidence(endpoint=found.name, lines=lines, public_key=self._signer.public_key))

    def _about(self, found: domain.Endpoint, now: float) -> dict[str, Any]:
        region = self._settings.region(found.region)
        return {
            "kind": "about",
            "endpoint": found.name,
            "endpoint_id": found.id,
            "tenant_id": found.tenant_id,
            "region": found.region,
            "provider": region.provider if region else None,
            "jurisdiction": region.jurisdiction if region else None,
            "created_at": iso(found.created_at),
            "written_at": iso(now),
        }

    def _exported(self, region: str) -> dict[str, Any]:
        export = self._exports.get(region)
        endpoint = None if export is None or export.endpoint is None else redact(export.endpoint)
        return {"kind": "exported", "what": "spans and metrics", "region": region, "to": endpoint,
                "why": None if export is None else str(export.why)}  # fmt: skip

    async def _ask(self, slots: asyncio.Semaphore, row: ReplicaRow) -> dict[str, Any]:
        async with slots:
            try:
                async with asyncio.timeout(_SECONDS):
                    told = await self._describe(row.region, row.id)
            except (IngleError, KeyError, TimeoutError) as error:
                return {"phase": None, "unknown": type(error).__name__}
        return {
            "phase": str(told.phase),
            "address": None if told.address is None else str(told.address),
            "region": told.region or row.region,
        }

    def _replica(self, found: domain.Endpoint, row: ReplicaRow, word: Mapping[str, Any]) -> list[dict[str, Any]]:
        region = self._settings.region(row.region)
        record = {
            "kind": "replica",
            "replica": row.id,
            "generation": row.generation,
            "provider": region.provider if region else None,
            "state": row.state,
            "reason": row.reason_code,
            "created_at": iso(row.created_at),
            "ready_at": None if row.ready_at is None else iso(row.ready_at),
            "terminated_at": None if row.terminated_at is None else iso(row.terminated_at),
            "provider_says": dict(word),
            **_residency(found, word.get("region") or row.region),
        }
        ended = row.state == ReplicaState.TERMINATED
        runs = word["phase"] not in (None, str(Phase.ABSENT))
        if ended != runs or word["phase"] is None:
            return [record]
        claim = "terminated" if ended else row.state
        return [record, {"kind": "disagreement", "replica": row.id, "we_say": claim, "provider_says": word["phase"]}]


def _residency(found: domain.Endpoint, region: str) -> dict[str, Any]:
    return {"region": region, "within_region": region == found.region}
