"""Evidence: what it holds, and that no byte of it can be changed unseen."""

from __future__ import annotations

import io
import json
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from control_plane.api.evidence import EvidenceOperations
from control_plane.api.idempotency import Once
from control_plane.api.operations import Actor, Call
from control_plane.client import AdminClient
from control_plane.config import load_settings
from control_plane.domain import Description, Kept, Phase, Role, Rung, Weights
from control_plane.errors import InvalidInput, NotFound, Unavailable
from control_plane.evidence import Verdict, Writer, lines_of, verify
from control_plane.security.audit import AuditSigner
from control_plane.security.secret import Secret
from control_plane.store import endpoints, evidence, replicas, usage
from control_plane.store.database import Store
from tests.control_plane.harness import Installation, chat, create, ingle, replica_pids, state_of, until
from tests.control_plane.test_store import make_endpoint
from tests.control_plane.test_store import usage as event

SIGNER = AuditSigner(Secret(b"s" * 32))
OTHER = AuditSigner(Secret(b"o" * 32))
RECORDS: list[dict[str, Any]] = [
    {"kind": "about", "endpoint": "chat", "region": "eu-1"},
    {"kind": "replica", "replica": "rep_1", "region": "eu-1", "within_region": True, "note": "ä"},
    {"kind": "traffic", "key_id": "k1", "requests": 12},
]


def check(lines: list[str] | str, signer: AuditSigner = SIGNER) -> Verdict:
    text = lines if isinstance(lines, str) else "\n".join(lines) + "\n"
    return verify(lines_of(io.StringIO(text, newline="\n")), signer.public_key)


def written(records: list[dict[str, Any]], signer: AuditSigner = SIGNER) -> list[str]:
    writer = Writer(signer.seal)
    return [*map(writer.line, records), writer.end()]


def test_what_was_written_is_intact() -> None:
    found = check(written(RECORDS))
    assert (found.faults, found.records, found.about["endpoint"]) == ([], 4, "chat")


def test_one_changed_byte_is_seen_wherever_it_is() -> None:
    text = "\n".join(written(RECORDS)) + "\n"
    for place in range(len(text)):
        for other in ("0", "x", " ", "\n", '"', text[place].swapcase()):
            if other != text[place]:
                broken = text[:place] + other + text[place + 1 :]
                assert check(broken).faults, (place, text[place], other)
        assert check(text[:place] + text[place + 1 :]).faults or place == len(text) - 1, f"{place} left out"


def test_lines_that_are_missing_moved_or_cut_off_are_seen() -> None:
    lines = written(RECORDS)
    kinds = {
        "missing": [lines[0], *lines[2:]],
        "reordered": [lines[1], lines[0], *lines[2:]],
        "cut": lines[:-1],
    }
    for kind, changed in kinds.items():
        assert kind in {fault.kind for fault in check(changed).faults}, kind
    assert "cut" in {fault.kind for fault in check([]).faults}
    assert check([*lines, lines[-1]]).faults
    # a shorter file that is whole in itself is another one, and says so by its head
    assert check(written(RECORDS[:2])).head != check(lines).head


def test_anothers_signature_is_seen() -> None:
    lines = written(RECORDS, OTHER)
    assert {fault.kind for fault in check(lines).faults} == {"unsigned"}
    spliced = [*written(RECORDS)[:2], *lines[2:]]
    assert check(spliced).faults
    with pytest.raises(InvalidInput, match="public key"):
        verify([], "no key")


def test_what_cannot_be_read_is_a_fault_not_a_crash() -> None:
    chance = random.Random(5)
    for _ in range(200):
        assert check("".join(chr(chance.randrange(1, 0x2FF)) for _ in range(80))).faults
    for line in (
        "[]",
        "null",
        '{"seq": 1}',
        "{" * 5000,
        json.dumps({"seq": 1, "content": {}, "previous": 1, "hash": 2}),
    ):
        assert check(line).faults


def test_a_line_without_end_is_a_fault_and_takes_no_more_memory_than_a_line_may() -> None:
    endless = io.StringIO("x" * (3 << 20), newline="\n")
    found = verify(lines_of(endless), SIGNER.public_key)
    assert {fault.kind for fault in found.faults} == {"changed", "cut"}


def call_of(name: str, now: float) -> Call:
    once = Once("operator", None, "", now)
    return Call(
        actor=Actor("operator", Role.OWNER), request_id="req_1", path={"name": name}, query={}, body=None,
        given=frozenset(), if_generation=None, once=once, seal=SIGNER.seal, now=now,
    )  # fmt: skip


async def test_all_that_is_on_record_is_told_page_by_page(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "PAGE", 2)
    asked: list[str] = []

    async def describe(region: str, replica_id: str) -> Description:
        asked.append(replica_id)
        return Description(Phase.ABSENT)

    async def kept(region: str, replica_id: str) -> Sequence[Kept]:
        raise AssertionError("of what is gone nothing is kept")

    settings = load_settings({"home": tmp_path}, {})
    operations = EvidenceOperations(store, settings, {}, SIGNER, describe, kept)
    endpoint = await make_endpoint(store)
    async with store.write() as session:
        for number in range(5):
            # several came to be in the same moment
            await replicas.add_intent(session, f"rep_{number}", endpoint, 1, Rung.HOT, 10.0 + number // 3)
            await replicas.write_replica(session, f"rep_{number}", {"state": "terminated", "terminated_at": 20.0})
            await endpoints.update_endpoint(session, endpoint.name, {"max_replicas": 3 + number}, 10.0)
            events = [event(f"{number}", endpoint_id=endpoint.id, key_id=f"k{number}", region="local-eu")]
            await usage.add_usage(session, events)
            endpoints.add_event(session, endpoint, 30.0, "retention", None, f"{number} usage events")
            await call_of(endpoint.name, 200.0).audit(session, "endpoint.update", endpoint.name)

    async def told(now: float) -> tuple[list[str], dict[str, list[dict[str, Any]]]]:
        answer = await operations.evidence(call_of(endpoint.name, now))
        lines: list[str] = []
        async for line in answer.text:
            lines.append(line)
            seen = {one["replica"] for one in map(content_of, lines) if one["kind"] == "replica"}
            assert len(asked) - len(seen) <= 2, "no more is held than a page"
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for content in map(content_of, lines):
            by_kind.setdefault(content["kind"], []).append(content)
        return lines, by_kind

    lines, found = await told(300.0)
    assert check(lines).faults == []
    assert [one["generation"] for one in found["generation"]] == [1, 2, 3, 4, 5, 6]
    assert [one["replica"] for one in found["replica"]] == asked == [f"rep_{number}" for number in range(5)]
    assert [one["key_id"] for one in found["traffic"]] == [f"k{number}" for number in range(5)]
    assert [one["what"] for one in found["deleted"]] == [f"{number} usage events" for number in range(5)]
    assert [one["action"] for one in found["change"]] == ["endpoint.update"] * 5 + ["endpoint.evidence"]
    assert (found["kept"][0]["replicas"]["count"], found["kept"][0]["generations"]["count"]) == (5, 6)

    # gone, and its name another's: the newest that had it is told of, and what it did alone
    async with store.write() as session:
        await endpoints.write_observed(session, endpoint, {"deleted_at": 400.0}, 400.0)
    asked.clear()
    _, found = await told(500.0)
    assert found["about"][0]["deleted_at"] == "1970-01-01T00:06:40.000Z"
    assert len(found["replica"]) == 5
    assert len(found["change"]) == 6, "what came after its end is another's"
    await make_endpoint(store)
    asked.clear()
    _, found = await told(600.0)
    assert found["about"][0]["endpoint_id"] != endpoint.id
    assert "replica" not in found
    with pytest.raises(NotFound, match="ever named"):
        await operations.evidence(call_of("nobody", 600.0))


async def test_what_a_provider_keeps_elsewhere_is_a_disagreement(store: Store, tmp_path: Path) -> None:
    async def describe(region: str, replica_id: str) -> Description:
        return Description(Phase.RUNNING)

    async def kept(region: str, replica_id: str) -> Sequence[Kept]:
        if replica_id == "rep_silent":
            raise Unavailable("not now")
        return [Kept("secrets", "a vault", region), Kept("secrets", "a vault", "us-west-2")]

    endpoint = await make_endpoint(store)
    read_at = Weights("s3://b/weights/m", "eu-central-1")
    async with store.write() as session:
        for name in ("rep_copied", "rep_silent"):
            await replicas.add_intent(session, name, endpoint, 1, Rung.HOT, 10.0)
            changes = {"state": "ready", "weights_from": read_at.source, "weights_region": read_at.region}
            await replicas.write_replica(session, name, changes)
        (row, _) = await replicas.by_id(session, ["rep_copied", "rep_silent"])
    assert row.weights == read_at
    settings = load_settings({"home": tmp_path}, {})
    answer = await EvidenceOperations(store, settings, {}, SIGNER, describe, kept).evidence(call_of("chat", 20.0))
    found = [content_of(line) async for line in answer.text]
    (told,) = [one for one in found if one["kind"] == "disagreement"]
    assert (told["we_say"], told["provider_says"]) == (f"secrets in {endpoint.region}", "a vault in us-west-2")
    copied, silent = (one for one in found if one["kind"] == "replica")
    assert copied["weights"] == {"from": "s3://b/weights/m", "region": "eu-central-1"}
    assert (silent["provider_says"]["phase"], silent["provider_says"]["unknown"]) == ("running", "Unavailable")


def content_of(line: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(line)["content"]
    return content


def test_evidence_that_is_cut_off_is_no_evidence(fresh: Installation, tmp_path: Path) -> None:
    fresh.up()
    with fresh.admin() as admin:
        create(admin, "cut", "fast", idle_timeout=600)
        admin.update_endpoint("cut", {"paused": True})
        until(lambda: state_of(admin, "cut") == "paused", "paused")
        with sqlite3.connect(fresh.home / "ingle.db") as database:
            database.execute("UPDATE replicas SET created_at = 1e300")  # no time at all
        file = tmp_path / "evidence.jsonl"
        done = ingle(fresh.home, "endpoint", "evidence", "cut", "-f", str(file))
        assert (done.returncode, "ended before its time" in done.stderr) == (1, True)
        assert not file.exists()
        got: list[str] = []
        with pytest.raises(Unavailable, match="ended before its time"):
            got.extend(admin.evidence("cut"))
        refused = ingle(fresh.home, "endpoint", "evidence", "cut", "-f", str(tmp_path / "no" / "folder"))
        assert (refused.returncode, "can't be written" in refused.stderr) == (2, True)
    assert "OverflowError" in fresh.programs[0].log()


def test_an_endpoint_leaves_evidence(platform: Installation, admin: AdminClient, tmp_path: Path) -> None:
    url = create(admin, "proved", "fast", idle_timeout=600)
    key = admin.create_key({"name": "proof"})
    with platform.tenant(url, key.secret) as tenant:
        assert tenant.post("/chat/completions", json=chat("CANARY-prompt")).status_code == 200
    admin.sleep_endpoint("proved")
    until(lambda: state_of(admin, "proved") == "zero", "at zero")
    admin.wake_endpoint("proved")
    until(lambda: state_of(admin, "proved") == "ready", "awake")
    until(lambda: any(use.requests for use in admin.usage() if use.endpoint == "proved"), "metered")
    file, public = tmp_path / "evidence.jsonl", tmp_path / "key.pem"
    assert ingle(platform.home, "endpoint", "evidence", "proved", "-f", str(file)).returncode == 0
    public.write_text(ingle(platform.home, "audit", "key").stdout)

    # checked where there is no installation
    nowhere = tmp_path / "nowhere"
    checked = ingle(nowhere, "audit", "verify", str(file), "--public-key", str(public), "-o", "json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["intact"] is True
    assert not nowhere.exists()

    contents = [json.loads(line)["content"] for line in file.read_text().splitlines()]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for content in contents:
        by_kind.setdefault(content["kind"], []).append(content)
    first, second = by_kind["replica"]
    assert (first["state"], first["provider_says"]["phase"]) == ("terminated", "absent")
    assert (second["state"], second["provider_says"]["phase"]) == ("ready", "running")
    assert all(record["within_region"] for record in (first, second, *by_kind["traffic"]))
    assert [record["weights"] for record in (first, second)] == [{"from": "node", "region": None}] * 2
    (kept,) = second["provider_says"]["keeps"]
    assert (kept["what"], kept["where"], kept["region"]) == ("secrets", "the control plane's machine", "local-eu")
    assert [(use["key_id"], use["requests"]) for use in by_kind["traffic"]] == [(key.id, 1)]
    assert {change["action"] for change in by_kind["change"]} >= {"endpoint.create", "endpoint.sleep", "endpoint.wake"}
    assert by_kind["about"][0]["keyring"] == "the control plane's machine"
    assert "disagreement" not in by_kind
    text = file.read_text()
    assert "CANARY" not in text
    assert key.secret not in text

    broken = text.replace('"requests":1', '"requests":2')
    assert broken != text
    file.write_text(broken)
    refused = ingle(nowhere, "audit", "verify", str(file), "--public-key", str(public))
    assert refused.returncode == 1
    assert "changed" in refused.stdout
    admin.delete_endpoint("proved")


def test_the_provider_is_believed_over_our_records(fresh: Installation) -> None:
    """A row that says terminated of a replica that runs: nobody may look better than the provider says."""
    fresh.more = {"INGLE_TIMING__SWEEP": "3600"}
    fresh.up()
    with fresh.admin() as admin:
        create(admin, "lying", "fast", idle_timeout=600)
        (replica,) = replica_pids(fresh)
        admin.update_endpoint("lying", {"paused": True})
        until(lambda: state_of(admin, "lying") == "paused", "paused")
        # the files by which the provider knows of a process, put back as if it still ran
        create(admin, "other", "fast", idle_timeout=600)
        (running,) = replica_pids(fresh)
        with sqlite3.connect(fresh.home / "ingle.db") as database:
            database.execute("UPDATE replicas SET id = 'gone' WHERE id = ?", (running,))
            database.execute("UPDATE replicas SET id = ? WHERE id = ?", (running, replica))
        contents = [json.loads(line)["content"] for line in admin.evidence("lying")]
    (said,) = [content for content in contents if content["kind"] == "disagreement"]
    assert (said["replica"], said["we_say"], said["provider_says"]) == (running, "terminated", "running")


def test_a_replica_that_runs_elsewhere_is_ended_and_told_of(fresh: Installation) -> None:
    """By its provider's word, whatever our own row says."""
    fresh.up()
    with fresh.admin() as admin:
        create(admin, "astray", "fast", idle_timeout=600)
        (replica,) = replica_pids(fresh)
        file = fresh.home / "replicas" / replica / "spec.json"
        file.write_text(file.read_text().replace('"local-eu"', '"local-me"'))
        until(lambda: admin.endpoint("astray").reason.code == "residency_mismatch", "it is seen")
        until(lambda: not replica_pids(fresh), "and ended")
        (event,) = [
            one for one in admin.events("astray") if one.replica == replica and one.code and one.state == "terminating"
        ]
        assert "runs in local-me, not in local-eu" in event.message
        assert state_of(admin, "astray") == "failed"
