"""Evidence: what it holds, and that no byte of it can be changed unseen."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from control_plane.client import AdminClient
from control_plane.errors import InvalidInput
from control_plane.evidence import Verdict, verify, write
from control_plane.security.audit import AuditSigner
from control_plane.security.secret import Secret
from tests.control_plane.harness import Installation, chat, create, ingle, replica_pids, state_of, until

SIGNER = AuditSigner(Secret(b"s" * 32))
OTHER = AuditSigner(Secret(b"o" * 32))
RECORDS: list[dict[str, Any]] = [
    {"kind": "about", "endpoint": "chat", "region": "eu-1"},
    {"kind": "replica", "replica": "rep_1", "region": "eu-1", "within_region": True, "note": "ä"},
    {"kind": "traffic", "key_id": "k1", "requests": 12},
]


def check(lines: list[str] | str, signer: AuditSigner = SIGNER) -> Verdict:
    text = lines if isinstance(lines, str) else "\n".join(lines) + "\n"
    return verify(text, signer.public_key)


def test_what_was_written_is_intact() -> None:
    found = check(write(RECORDS, SIGNER.seal))
    assert (found.faults, found.records, found.about["endpoint"]) == ([], 4, "chat")


def test_one_changed_byte_is_seen_wherever_it_is() -> None:
    text = "\n".join(write(RECORDS, SIGNER.seal)) + "\n"
    for place in range(len(text)):
        for other in ("0", "x", " ", "\n", '"', text[place].swapcase()):
            if other != text[place]:
                broken = text[:place] + other + text[place + 1 :]
                assert check(broken).faults, (place, text[place], other)
        assert check(text[:place] + text[place + 1 :]).faults or place == len(text) - 1, f"{place} left out"


def test_lines_that_are_missing_moved_or_cut_off_are_seen() -> None:
    lines = write(RECORDS, SIGNER.seal)
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
    assert check(write(RECORDS[:2], SIGNER.seal)).head != check(lines).head


def test_anothers_signature_is_seen() -> None:
    lines = write(RECORDS, OTHER.seal)
    assert {fault.kind for fault in check(lines).faults} == {"unsigned"}
    spliced = [*write(RECORDS, SIGNER.seal)[:2], *lines[2:]]
    assert check(spliced).faults
    with pytest.raises(InvalidInput, match="public key"):
        verify("", "no key")


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
    assert [(use["key_id"], use["requests"]) for use in by_kind["traffic"]] == [(key.id, 1)]
    assert {change["action"] for change in by_kind["change"]} >= {"endpoint.create", "endpoint.sleep", "endpoint.wake"}
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
    import sqlite3

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
        contents = [json.loads(line)["content"] for line in admin.evidence("lying").lines]
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
