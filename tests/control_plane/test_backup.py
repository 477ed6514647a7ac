"""Backups: a file that is whole or told from one that isn't, kept where its records may lie, and an installation that
comes back from it."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command

from control_plane.app import keyring_of
from control_plane.backup import archive, database, work
from control_plane.backup.place import require_place
from control_plane.backup.sealed import SealedReader, SealedWriter
from control_plane.client import AdminClient
from control_plane.config import load_settings
from control_plane.errors import ConfigError, DamagedBackup, KeyringMissing, ResidencyMismatch
from control_plane.jurisdiction import within
from control_plane.security.files import private_folder
from control_plane.security.keyring import Keyring, LocalKeeper, open_keyring
from control_plane.security.secret import load_secret
from control_plane.store.schema import _config, schema_status
from tests.control_plane.harness import Aws, Installation, chat, create, ingle, installed, until

CHUNK = 1 << 20


def keyring_at(folder: Path) -> Keyring:
    return Keyring(LocalKeeper(folder / "keyring"))


def sealed(keyring: Keyring, data: bytes, header: dict[str, Any] | None = None) -> bytes:
    file = io.BytesIO()
    writer = SealedWriter(file, header or {"version": "1"}, keyring)
    for start in range(0, len(data), 300_000):
        writer.write(data[start : start + 300_000])
    writer.close()
    return file.getvalue()


def opened(keyring: Keyring, text: bytes) -> bytes:
    reader = SealedReader(io.BytesIO(text), keyring)
    found = b"".join(iter(lambda: reader.read(700_001), b""))
    reader.finish()
    return found


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 77])
def test_what_was_sealed_comes_back_and_no_less_and_no_more(tmp_path: Path, size: int) -> None:
    keyring, data = keyring_at(tmp_path), os.urandom(size)
    text = sealed(keyring, data)
    assert size < 64 or data[:64] not in text
    assert opened(keyring, text) == data
    for cut in {len(text) - 1, len(text) - 17, len(text) - CHUNK - 16, len(text) - CHUNK, len(text) // 2, 20, 0}:
        if 0 <= cut < len(text):
            with pytest.raises((DamagedBackup, ConfigError)):
                opened(keyring, text[:cut])
    for more in (b"\0", text[-16:], text[-CHUNK - 16 :]):
        with pytest.raises(DamagedBackup):
            opened(keyring, text + more)


def test_one_changed_byte_is_told_wherever_it_is(tmp_path: Path) -> None:
    keyring, chance = keyring_at(tmp_path), random.Random(7)
    text = sealed(keyring, os.urandom(CHUNK + 100))
    header = text.index(b"\n", 15) + 1
    places = [*range(header), *(chance.randrange(header, len(text)) for _ in range(60)), len(text) - 1]
    for place in places:
        changed = bytearray(text)
        changed[place] ^= 1
        with pytest.raises((DamagedBackup, ConfigError)):
            opened(keyring, bytes(changed))


def test_parts_cannot_change_places_nor_come_from_another_backup(tmp_path: Path) -> None:
    keyring = keyring_at(tmp_path)
    text, other = (sealed(keyring, os.urandom(3 * CHUNK)) for _ in range(2))
    start, part = text.index(b"\n", 15) + 1, CHUNK + 16
    first, second = text[start : start + part], text[start + part : start + 2 * part]
    assert len(text) == len(other)
    for broken in (
        text[:start] + second + first + text[start + 2 * part :],
        text[: start + part] + other[start + part :],
        other[:start] + text[start:],
    ):
        with pytest.raises(DamagedBackup):
            opened(keyring, broken)


def test_a_key_that_no_keyring_sealed_is_not_taken(tmp_path: Path) -> None:
    """As of somebody who makes up a whole backup of his own."""
    keyring = keyring_at(tmp_path)

    class Naive(Keyring):
        def seal(self, secret: bytes, name: str) -> bytes:
            return b"k" * 32

    for forged in (sealed(Naive(LocalKeeper(tmp_path / "none")), b"x"), b"INGLE BACKUP 1\n{}\n", b"", b"INGLE"):
        with pytest.raises(DamagedBackup):
            opened(keyring, forged)
    with pytest.raises(KeyringMissing, match="isn't there"):
        opened(keyring_at(tmp_path / "nowhere"), sealed(keyring, b"x"))
    another = keyring_at(tmp_path / "another")
    another.seal(b"x", "x")
    with pytest.raises(ConfigError, match="has no key"):
        opened(another, sealed(keyring, b"x"))
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["home/../x", "/etc/passwd", "home/keyring", "home/certs/..", "database/x"])
def test_what_no_backup_has_is_not_unpacked(tmp_path: Path, name: str) -> None:
    keyring, file = keyring_at(tmp_path), tmp_path / "file"
    file.write_bytes(b"x")
    to = io.BytesIO()
    archive.pack([(name, file)], SealedWriter(to, {}, keyring))
    to.seek(0)
    with pytest.raises(DamagedBackup, match="that no backup has"):
        archive.unpack(SealedReader(to, keyring), archive.into_folder(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_whose_law_holds_where() -> None:
    for place, law in (("DE", "DE"), ("DE-BY", "DE"), ("DE", "EU"), ("DE-BY", "EU"), ("EU", "EU"), (None, None)):
        assert within(place, law), (place, law)
    for place, law in (("EU", "DE"), ("DE", "DE-BY"), ("CH", "EU"), (None, "DE"), ("AE", "DE"), ("DEX", "DE")):
        assert not within(place, law), (place, law)


def test_a_backup_lies_where_each_regions_law_holds_or_is_accepted() -> None:
    laws = {"de-1": "DE", "me-1": "AE", "any": None}
    require_place("DE", {"de-1": "DE", "any": None}, ["de-1"], [])
    require_place(None, {"any": None}, ["any"], [])
    require_place("DE", laws, ["de-1", "me-1"], ["AE"])
    for place, accepts, says in (
        (None, [], r"de-1 \(DE\), me-1 \(AE\) may not lie just anywhere"),
        ("DE", [], r"me-1 \(AE\) may not lie in DE"),
        ("US", ["AE"], r"de-1 \(DE\) may not lie in US"),
        (None, ["AE"], r"de-1 \(DE\) may not lie just anywhere"),
    ):
        with pytest.raises(ResidencyMismatch, match=says):
            require_place(place, laws, [], accepts)
    with pytest.raises(ResidencyMismatch, match="records of fr-1, which the settings don't have any more"):
        require_place(None, {"any": None}, ["any", "fr-1"], [])
    require_place(None, {"any": None}, ["any", "fr-1"], ["fr-1"])


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def evidence(admin: AdminClient, name: str, kind: str) -> list[dict[str, Any]]:
    contents = [json.loads(line)["content"] for line in admin.evidence(name)]
    return [content for content in contents if content["kind"] == kind]


def come_back(fresh: Installation, tmp_path: Path, more: Callable[[Path], dict[str, str]] = lambda home: {}) -> None:
    """From create to a platform that came up from it, with the same key, endpoint and chain."""
    file, kept, home = tmp_path / "a.backup", tmp_path / "kept-keyring", tmp_path / "again"
    fresh.home.mkdir()
    (fresh.home / "ingle.toml").write_text('[backup]\njurisdiction = "DE"\n')
    program = fresh.up()
    with fresh.admin() as admin:
        url = create(admin, "chat", "fast", idle_timeout=600)
        key = admin.create_key({"name": "k"}).secret
        made = shown(ingle(fresh.home, "backup", "create", str(file), "-o", "json", **fresh.more))
        with fresh.tenant(url, key) as tenant:
            assert tenant.post("/chat/completions", json=chat()).status_code == 200, "nothing was stopped for it"
        (told,) = evidence(admin, "chat", "backup")
        assert (told["digest"], told["jurisdiction"], told["within_jurisdiction"]) == (made["digest"], "DE", True)
        assert str(file) not in json.dumps([entry.model_dump(mode="json") for entry in admin.audit(50)])
        assert admin.verify_audit(None).intact
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_bytes()
    assert b"SQLite format" not in text
    assert b"chat" not in text
    assert sorted(path.name for path in fresh.home.iterdir() if path.name.startswith(".backup")) == []
    shutil.copyfile(fresh.home / "keyring", kept)
    program.stop()

    checked = shown(ingle(tmp_path / "nowhere", "backup", "verify", str(file), "--keyring", str(kept), "-o", "json"))
    assert checked == made
    assert not (tmp_path / "nowhere").exists()
    own = more(home)
    restored = ingle(home, "backup", "restore", str(file), "--keyring", str(kept), "-o", "json", **own)
    assert shown(restored)["digest"] == made["digest"]
    for keys, says in ((), "--keyring must name"), (("--keyring", str(tmp_path / "gone")), "does not exist"):
        refused = ingle(tmp_path / "nowhere", "backup", "restore", str(file), *keys, **own)
        assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
        assert not (tmp_path / "nowhere").exists()
    again = ingle(home, "backup", "restore", str(file), "--keyring", str(kept), **own)
    assert (again.returncode, "isn't empty" in again.stderr) == (2, True)
    with installed(home, **own) as installation:
        installation.up()
        with installation.admin() as admin:
            until(lambda: admin.endpoint("chat").state == "ready", "it serves again")
            with installation.tenant(admin.endpoint("chat").url, key) as tenant:
                assert tenant.post("/chat/completions", json=chat()).status_code == 200
            assert (installation.home / "certs" / "ca.pem").read_bytes() == (
                fresh.home / "certs" / "ca.pem"
            ).read_bytes()
        assert shown(ingle(home, "audit", "verify", "-o", "json"))["intact"] is True
        with installation.admin() as admin:
            actions = [entry.action for entry in admin.audit(50)]
        assert "backup.restore" in actions
        assert "endpoint.create" in actions


def test_an_installation_comes_back(fresh: Installation, tmp_path: Path) -> None:
    come_back(fresh, tmp_path)


@pytest.mark.postgres
def test_an_installation_comes_back_on_postgres(postgres_url: str, fresh: Installation, tmp_path: Path) -> None:
    with psycopg.connect(postgres_url.replace("+psycopg", "") + "postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE backed_up")
        connection.execute("CREATE DATABASE brought_back")
    fresh.more = {"INGLE_DATABASE_URL": f"{postgres_url}backed_up"}
    own = {"INGLE_DATABASE_URL": f"{postgres_url}brought_back"}
    come_back(fresh, tmp_path, lambda home: own)
    keys, home = str(tmp_path / "kept-keyring"), tmp_path / "third"
    refused = ingle(home, "backup", "restore", str(tmp_path / "a.backup"), "--keyring", keys, **own)
    assert (refused.returncode, "database_url names isn't empty" in refused.stderr) == (2, True)
    assert not home.exists()


def test_what_is_written_meanwhile_breaks_nothing(fresh: Installation, tmp_path: Path) -> None:
    fresh.up()
    file, home, over = tmp_path / "a.backup", tmp_path / "again", threading.Event()

    def write() -> None:
        with fresh.admin() as admin:
            while not over.is_set():
                admin.create_key({"name": "k"})

    with ThreadPoolExecutor(2) as writers:
        wrote = [writers.submit(write) for _ in range(2)]
        try:
            made = shown(ingle(fresh.home, "backup", "create", str(file), "-o", "json"))
        finally:
            over.set()
        for one in wrote:
            one.result(30)
    with fresh.admin() as admin:
        assert admin.verify_audit(None).intact
    shown(ingle(home, "backup", "restore", str(file), "--keyring", str(fresh.home / "keyring"), "-o", "json"))
    with installed(home) as installation:
        installation.up()
        with installation.admin() as admin:
            found = admin.verify_audit(None)
            (restored,) = [entry for entry in admin.audit(1) if entry.action == "backup.restore"]
    assert (found.intact, found.faults) == (True, [])
    assert (restored.seq, restored.detail) == (found.records, {"digest": made["digest"]})


def test_a_backup_of_an_older_version_comes_back_in_this_ones_schema(tmp_path: Path, sqlite_template: Path) -> None:
    home, file, again = tmp_path / "home", tmp_path / "a.backup", tmp_path / "again"
    keyring = open_keyring(private_folder(home))
    load_secret(home, keyring)
    shutil.copyfile(sqlite_template, home / "ingle.db")
    url = load_settings({"home": home}, {}).store_url
    command.downgrade(_config(url), "0009")
    copy = database.dump(url, private_folder(tmp_path / "copy"))
    with file.open("wb") as to:
        archive.pack([*archive.files_of(home), ("database/ingle.db", copy)], SealedWriter(to, {}, keyring))
    work.restore(file, again, home / "keyring", keyring_of, 1.0)
    assert schema_status(load_settings({"home": again}, {}).store_url).up_to_date


@pytest.mark.postgres
def test_a_database_that_is_not_empty_is_left_as_it_is(postgres_url: str, tmp_path: Path) -> None:
    with psycopg.connect(postgres_url.replace("+psycopg", "") + "postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE filled")
    with psycopg.connect(postgres_url.replace("+psycopg", "") + "filled") as connection:
        connection.execute("CREATE TABLE theirs (id int)")
    with pytest.raises(ConfigError, match="isn't empty"):
        database.require_empty(f"{postgres_url}filled", database.POSTGRES)
    with pytest.raises(ConfigError, match="is of SQLite"):
        database.require_empty(f"{postgres_url}filled", database.SQLITE)


def test_without_the_program_of_postgres_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pg_dump isn't installed") as missing:
        database.dump("postgresql+psycopg://u:secret@127.0.0.1:1/x", tmp_path)
    assert missing.value.code == "pg_dump_missing"


def test_no_password_is_among_a_programs_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "pg_dump"
    program.write_text('#!/bin/sh\necho "$@"\necho "$PGPASSWORD" >&2\nexit "${FAILS:-0}"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    written = database.dump("postgresql+psycopg://u:CANARY@h:1/x?sslmode=require", tmp_path).read_text()
    assert "host=h" in written
    assert "sslmode=require" in written
    assert "CANARY" not in written


def test_a_backup_that_would_leave_its_place_is_not_made(fresh: Installation, tmp_path: Path) -> None:
    fresh.up()
    regions = json.dumps([{"name": "local-eu", "jurisdiction": "DE"}, {"name": "local-me", "jurisdiction": "AE"}])
    file = tmp_path / "a.backup"
    for more, says in (
        ({}, "backup.jurisdiction must say whose law holds"),
        ({"INGLE_BACKUP__JURISDICTION": "DE"}, "records of local-me (AE) may not lie in DE"),
        ({"INGLE_BACKUP__JURISDICTION": "US"}, "may not lie in US, where backup.jurisdiction says"),
    ):
        refused = ingle(fresh.home, "backup", "create", str(file), INGLE_REGIONS=regions, **more)
        assert (refused.returncode, says in refused.stderr) == (3, True), refused.stderr
        assert not file.exists()
    accepted = {"INGLE_BACKUP__JURISDICTION": "DE", "INGLE_BACKUP__ACCEPTS": '["AE"]'}
    made = shown(ingle(fresh.home, "backup", "create", str(file), "-o", "json", INGLE_REGIONS=regions, **accepted))
    assert (made["jurisdiction"], made["accepts"]) == ("DE", ["AE"])
    with fresh.admin() as admin:
        (entry,) = [entry for entry in admin.audit(50) if entry.action == "backup.create"]
    assert entry.detail["jurisdictions"] == ["AE", "DE"]
    assert entry.detail["accepts"] == ["AE"]
    twice = ingle(fresh.home, "backup", "create", str(file), INGLE_REGIONS=regions, **accepted)
    assert (twice.returncode, "is there already" in twice.stderr) == (2, True)


def test_a_broken_backup_is_told_and_nothing_comes_back_from_it(fresh: Installation, tmp_path: Path) -> None:
    assert ingle(fresh.home, "backup", "create", str(tmp_path / "none")).returncode == 2
    assert not fresh.home.exists()
    fresh.up().stop()
    file, home, keys = tmp_path / "a.backup", tmp_path / "again", str(fresh.home / "keyring")
    assert ingle(fresh.home, "backup", "create", str(file)).returncode == 0
    text = file.read_bytes()
    changed = bytearray(text)
    changed[len(text) // 2] ^= 1
    for broken in (bytes(changed), text[:-1], text[: len(text) // 2], text + b"x", b"", os.urandom(500)):
        file.write_bytes(broken)
        verified = ingle(fresh.home, "backup", "verify", str(file))
        assert (verified.returncode, verified.stdout) == (1, "")
        assert len(verified.stderr.splitlines()) == 1
        restored = ingle(home, "backup", "restore", str(file), "--keyring", keys)
        assert restored.returncode == 1
        assert not home.exists()
    file.write_bytes(text)
    (tmp_path / "other").write_text("{}")
    strange = ingle(home, "backup", "restore", str(file), "--keyring", str(tmp_path / "other"))
    assert (strange.returncode, "has no key" in strange.stderr) == (2, True)
    assert not home.exists()


def test_a_keyring_of_kms_opens_it_where_the_environment_names_it(
    aws: Aws, tmp_path: Path, sqlite_template: Path
) -> None:
    """The backup itself isn't asked whose keys open it."""
    client, home, again = aws.client("kms"), tmp_path / "home", tmp_path / "again"
    key, file = client.create_key()["KeyMetadata"]["KeyId"], str(tmp_path / "a.backup")
    load_secret(private_folder(home), open_keyring(home, kms_key=key, kms_client=client))
    shutil.copyfile(sqlite_template, home / "ingle.db")
    kms = {f"INGLE_KEYRING__{name}": value for name, value in
           (("KMS_KEY", key), ("AWS_REGION", aws.region), ("ENDPOINT_URL", aws.url))}  # fmt: skip
    shown(ingle(home, "backup", "create", file, "-o", "json", **kms))
    without = ingle(again, "backup", "restore", file)
    assert (without.returncode, "sealed by kms: the settings name no such keyring" in without.stderr) == (2, True)
    shown(ingle(again, "backup", "restore", file, "-o", "json", **kms))
    assert {path.name for path in again.iterdir()} == {"secret", "ingle.db"}


def test_settings_of_backups_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backup\.jurisdiction"):
        load_settings({"home": tmp_path}, {"INGLE_BACKUP__JURISDICTION": "Germany"})
    found = load_settings({"home": tmp_path}, {"INGLE_BACKUP__ACCEPTS": '["AE", "old-1"]'})
    assert found.backup.accepts == ("AE", "old-1")
