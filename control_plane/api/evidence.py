"""The operation that puts together what proves where an endpoint ran."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane import domain
from control_plane.api import schemas
from control_plane.api.operations import Call, Lines, Operation
from control_plane.config import RegionSettings, Settings
from control_plane.domain import Phase, ReplicaState, Role
from control_plane.errors import IngleError
from control_plane.evidence import Writer
from control_plane.jurisdiction import within
from control_plane.observe.exports import Export
from control_plane.observe.logs import iso, redact
from control_plane.security.audit import AuditSigner
from control_plane.store import backups, evidence
from control_plane.store.database import Store
from control_plane.store.models import AuditRow, ReplicaRow

Describe = Callable[[str, str], Awaitable[domain.Description]]
"""Region and replica id → what the provider says of it now. Raises ProviderError, KeyError."""
WhatIsKept = Callable[[str, str], Awaitable[Sequence[domain.Kept]]]
"""Region and replica id → where the provider says that it keeps what is the replica's own. Raises the same."""
Row = TypeVar("Row")
After = TypeVar("After")
_AT_ONCE = 16
_SECONDS = 10.0


class EvidenceOperations:
    """`describe` and `kept` are the providers', handed in: the API knows none. Their word is believed over our own."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        exports: Mapping[str, Export],
        signer: AuditSigner,
        describe: Describe,
        kept: WhatIsKept,
    ) -> None:
        self._store = store
        self._settings = settings
        self._exports = exports
        self._signer = signer
        self._describe = describe
        self._kept = kept

    def table(self) -> list[Operation]:
        return [
            Operation("showEvidence", "GET", "/admin/v1/endpoints/{name}/evidence", Role.OWNER,
                      "Where it ran, by which keys it was used, what was kept and deleted: chained and signed lines",
                      self.evidence, schemas.EvidenceLine, is_lines=True),
        ]  # fmt: skip

    async def evidence(self, call: Call) -> Lines:
        async with self._store.read() as session:
            found = await evidence.endpoint_named(session, call.path["name"])
        async with self._store.write() as session:
            await call.audit(session, "endpoint.evidence", found.name)
        return Lines(self._lines(found, call.now))

    async def _lines(self, found: domain.Endpoint, now: float) -> AsyncGenerator[str, None]:
        writer = Writer(self._signer.seal)
        async for records in self._records(found, now):
            # signing takes a while
            for line in await asyncio.to_thread(lambda some: [writer.line(one) for one in some], records):
                yield line
        yield writer.end()

    async def _records(self, found: domain.Endpoint, now: float) -> AsyncIterator[list[dict[str, Any]]]:
        """All that is on record, a page at a time."""
        yield [self._about(found, now)]
        async for asked in self._pages(
            lambda session, after: evidence.generations_of(session, found.id, after), 0, lambda row: row.generation
        ):
            yield [
                {"kind": "generation", "generation": one.generation, "at": iso(one.at), "outcome": one.outcome,
                 "region": found.region, "model": one.spec["model"], "gpu": one.spec["gpu"]}
                for one in asked
            ]  # fmt: skip
        slots = asyncio.Semaphore(_AT_ONCE)
        async for rows in self._pages(
            lambda session, after: evidence.replicas_of(session, found.id, after),
            (-1.0, ""),
            lambda row: (row.created_at, row.id),
        ):
            said = await asyncio.gather(*(self._ask(slots, row) for row in rows))
            yield [one for row, word in zip(rows, said, strict=True) for one in self._replica(found, row, word)]
        async for traffic in self._pages(
            lambda session, after: evidence.traffic_of(session, found.id, after),
            ("", ""),
            lambda row: (row["key_id"], row["region"]),
        ):
            yield [{"kind": "traffic", **entry, **_residency(found, entry["region"])} for entry in traffic]
        async with self._store.read() as session:
            kept = await evidence.kept_of(session, found.id)
        yield [self._exported(found.region), {"kind": "kept", "retention_seconds": found.retention, **kept}]
        async for deletions in self._pages(
            lambda session, after: evidence.deletions_of(session, found.id, after), 0, lambda row: row.id
        ):
            yield [{"kind": "deleted", "at": iso(row.at), "what": row.message} for row in deletions]
        async for made in self._pages(
            lambda session, after: backups.backups_since(session, found.created_at, after), 0, lambda row: row.seq or 0
        ):
            yield [self._backup(found, row) for row in made]
        async for audited in self._pages(
            lambda session, after: evidence.audit_of(session, found, after), 0, lambda row: row.seq or 0
        ):
            yield [
                {"kind": "change", "at": iso(row.at), "actor": row.actor, "action": row.action, "audit_seq": row.seq,
                 "audit_hash": row.hash}
                for row in audited
            ]  # fmt: skip

    async def _pages(
        self,
        read: Callable[[AsyncSession, After], Awaitable[Sequence[Row]]],
        after: After,
        place: Callable[[Row], After],
    ) -> AsyncIterator[Sequence[Row]]:
        """What `read` gives after each row's `place`, until there is no more."""
        while True:
            async with self._store.read() as session:
                rows = await read(session, after)
            if not rows:
                return
            yield rows
            after = place(rows[-1])

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
            "keyring": self._settings.keyring.place,
            "created_at": iso(found.created_at),
            "deleted_at": None if found.deleted_at is None else iso(found.deleted_at),
            "written_at": iso(now),
        }

    def _exported(self, region: str) -> dict[str, Any]:
        export = self._exports.get(region)
        endpoint = None if export is None or export.endpoint is None else redact(export.endpoint)
        return {"kind": "exported", "what": "spans and metrics", "region": region, "to": endpoint,
                "why": None if export is None else str(export.why)}  # fmt: skip

    def _backup(self, found: domain.Endpoint, row: AuditRow) -> dict[str, Any]:
        """Made while this endpoint's records were there, or may have been."""
        region = self._settings.region(found.region)
        place = row.detail.get("jurisdiction")
        return {
            "kind": "backup",
            "at": iso(row.at),
            "digest": row.detail.get("digest"),
            "jurisdiction": place,
            "within_jurisdiction": region is not None and within(place, region.jurisdiction),
            "accepts": row.detail.get("accepts"),
            "audit_seq": row.seq,
        }

    async def _ask(self, slots: asyncio.Semaphore, row: ReplicaRow) -> dict[str, Any]:
        word: dict[str, Any] = {"phase": None}
        async with slots:
            try:
                async with asyncio.timeout(_SECONDS):
                    told = await self._describe(row.region, row.id)
                    word |= {
                        "phase": str(told.phase),
                        "address": None if told.address is None else str(told.address),
                        "region": told.region or row.region,
                    }
                    kept = () if told.phase is Phase.ABSENT else await self._kept(row.region, row.id)
                    word["keeps"] = [asdict(one) for one in kept]
            except (IngleError, KeyError, TimeoutError) as error:
                word["unknown"] = type(error).__name__
        return word

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
            "refused_at": None if row.refused_at is None else iso(row.refused_at),
            "ready_at": None if row.ready_at is None else iso(row.ready_at),
            "terminated_at": None if row.terminated_at is None else iso(row.terminated_at),
            "weights": _weights(row, region),
            "provider_says": dict(word),
            **_residency(found, word.get("region") or row.region),
        }
        records = [record]
        ended = row.state == ReplicaState.TERMINATED
        runs = word["phase"] not in (None, str(Phase.ABSENT))
        if ended == runs and word["phase"] is not None:
            claim = "terminated" if ended else row.state
            records.append(_disagreement(row, claim, word["phase"]))
        for one in word.get("keeps", ()):
            if one["region"] != row.region:
                records.append(
                    _disagreement(row, f"{one['what']} in {row.region}", f"{one['where']} in {one['region']}")
                )
        return records


def _weights(row: ReplicaRow, region: RegionSettings | None) -> dict[str, Any] | None:
    """Where it read them; None where that isn't known, or it never came so far."""
    if row.weights_from is not None:
        return {"from": row.weights_from, "region": row.weights_region}
    on_node = row.ready_at is not None and region is not None and region.provider != "aws"
    return {"from": domain.NODE, "region": None} if on_node else None


def _disagreement(row: ReplicaRow, ours: str, theirs: str) -> dict[str, Any]:
    return {"kind": "disagreement", "replica": row.id, "we_say": ours, "provider_says": theirs}


def _residency(found: domain.Endpoint, region: str) -> dict[str, Any]:
    return {"region": region, "within_region": region == found.region}
