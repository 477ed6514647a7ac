"""The chain of audit records, and what is deleted in time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from sqlalchemy import text

from control_plane.autoscaler.retention import enforce_retention
from control_plane.chain import Fault, Verifier
from control_plane.security.audit import AuditSigner
from control_plane.security.secret import load_secret
from control_plane.store import audit, endpoints, usage
from control_plane.store.database import Store
from tests.control_plane.harness import Installation, ingle
from tests.control_plane.test_metering import event
from tests.control_plane.test_store import make_endpoint


@pytest.fixture
def signer(tmp_path: Path) -> AuditSigner:
    return AuditSigner(load_secret(tmp_path / "home"))


async def append(store: Store, signer: AuditSigner, number: int) -> None:
    async with store.write() as session:
        await audit.add_audit(
            session, signer.seal, at=100.25 + number, actor="ops", role="owner", action="key.create",
            target=f"k{number}", request_id="req", detail={"grace": 60.0, "list": (1, 2), "name": "Ü", "none": None},
        )  # fmt: skip


async def check(store: Store, signer: AuditSigner, kept: str = "0" * 64) -> tuple[list[Fault], str]:
    verifier = Verifier(signer.signed, kept)
    async with store.read() as session:
        after = 0
        while page := await audit.chain(session, after=after, limit=3):
            verifier.take(record for _, record in page)
            after = page[-1][0]
        verifier.end(await audit.chain_length(session))
    return verifier.faults, verifier.head


@pytest.mark.parametrize(
    ("statements", "kinds"),
    [
        (["UPDATE audit_records SET actor = 'nobody' WHERE seq = 3"], {"changed"}),
        (["UPDATE audit_records SET detail = '{}' WHERE seq = 8"], {"changed"}),
        (["DELETE FROM audit_records WHERE seq = 3"], {"missing"}),
        (["DELETE FROM audit_records WHERE seq = 1"], {"missing"}),
        (["DELETE FROM audit_records WHERE seq > 6"], {"cut"}),
        (["UPDATE audit_records SET seq = NULL WHERE seq = 4"], {"missing"}),
        (["UPDATE audit_records SET id = 99 WHERE seq = 4"], {"missing", "reordered"}),
        (
            [
                "UPDATE audit_records SET seq = 90 WHERE seq = 4",
                "UPDATE audit_records SET seq = 4 WHERE seq = 5",
                "UPDATE audit_records SET seq = 5 WHERE seq = 90",
            ],
            {"missing", "reordered", "changed"},
        ),
        (["UPDATE audit_records SET signature = '00' WHERE seq = 2"], {"unsigned"}),
    ],
)
async def test_what_was_done_to_the_records_shows(
    store: Store, signer: AuditSigner, statements: list[str], kinds: set[str]
) -> None:
    await asyncio.gather(*(append(store, signer, number) for number in range(8)))
    faults, head = await check(store, signer)
    assert faults == []
    async with store.write() as session:
        for statement in statements:
            await session.execute(text(statement))
    faults, _ = await check(store, signer, head)
    assert kinds <= {fault.kind for fault in faults}


async def test_a_chain_written_anew_shows_against_a_head_that_was_kept(
    store: Store, signer: AuditSigner, tmp_path: Path
) -> None:
    await append(store, signer, 1)
    await append(store, signer, 2)
    _, head = await check(store, signer)
    async with store.write() as session:
        await session.execute(text("DELETE FROM audit_records WHERE seq = 2"))
        await session.execute(text("UPDATE counters SET value = 1 WHERE name = 'audit'"))
    assert (await check(store, signer))[0] == []
    await append(store, signer, 3)
    assert [fault.kind for fault in (await check(store, signer, head))[0]] == ["cut"]
    stranger = AuditSigner(load_secret(tmp_path / "stranger"))
    assert {fault.kind for fault in (await check(store, stranger))[0]} == {"unsigned"}


async def test_an_export_can_be_checked_with_the_public_key(store: Store, signer: AuditSigner) -> None:
    await append(store, signer, 1)
    async with store.read() as session:
        ((_, record),) = await audit.chain(session, after=0, limit=9)
    public = load_pem_public_key(signer.public_key.encode())
    assert isinstance(public, Ed25519PublicKey)
    public.verify(bytes.fromhex(record.signature), bytes.fromhex(record.hash))


def test_verify_from_the_command_line(platform: Installation) -> None:
    assert ingle(platform.home, "tenant", "create", "audited").returncode == 0
    found = ingle(platform.home, "audit", "verify", "-o", "json")
    assert found.returncode == 0, found.stderr
    assert '"intact": true' in found.stdout
    lost = ingle(platform.home, "audit", "verify", "--head", "f" * 64)
    assert lost.returncode == 1
    assert "cut" in lost.stdout


async def test_events_are_deleted_when_their_endpoint_says_so_and_hours_stay(store: Store) -> None:
    day = 86_400.0
    short = await make_endpoint(store, name="short", retention=day)
    long = await make_endpoint(store, name="long", retention=200 * day)
    gone = await make_endpoint(store, name="gone", region="local-me", retention=day)
    now = 300 * day
    async with store.write() as session:
        await endpoints.write_observed(session, gone, {"deleted_at": now - 1.5 * day}, now)
    async with store.write() as session:
        for endpoint_id in (short.id, long.id, gone.id, "ep_gone"):
            ages = (0.5, 2, 100, 250)
            events = [
                event(f"{endpoint_id}{age}", endpoint_id=endpoint_id, started_at=now - age * day, region="local-eu")
                for age in ages
            ]
            await usage.add_usage(session, events)
        for one in (short, long):
            endpoints.add_event(session, one, now - 2 * day, "note", None, "two days old")
    async with store.read() as session:
        known = [*await endpoints.list_endpoints(session), *await endpoints.list_deleted(session, now)]
    deleted = await enforce_retention(store, known, now, batch=2)
    # Of `short` and `gone` all but the newest; of `long` and what nobody knows, what is older than anything is kept.
    assert deleted == {"usage_events": 3 + 3 + 1 + 1, "endpoint_events": 2 + 1 + 1}
    assert await enforce_retention(store, known, now) == {"usage_events": 0, "endpoint_events": 0}
    async with store.read() as session:
        hours = await usage.usage_summary(session, since=0, until=now)
        assert sum(row["requests"] for row in hours) == 16
        assert await endpoints.list_deleted(session, now + 20 * day) == []
        kept = await endpoints.list_events(session)
        assert [e.message for e in kept if e.kind != "retention"] == ["two days old"]
        told = {e.message for e in kept if e.kind == "retention"}
        assert told == {
            "3 usage events, 2 endpoint events older than 86400 s",
            "3 usage events, 1 endpoint events older than 86400 s",
            "1 usage events, 1 endpoint events older than 1.728e+07 s",
        }
