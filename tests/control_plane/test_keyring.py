"""Secrets at rest are sealed, by local keys or by AWS KMS, and key-encryption keys rotate under running processes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from control_plane.errors import ConfigError, Unavailable
from control_plane.security.aws import aws_client
from control_plane.security.certificates import CertificateAuthority
from control_plane.security.keyring import (
    IN_THE_CLEAR,
    Keyring,
    KmsKeeper,
    LocalKeeper,
    open_keyring,
    rotate_keyring,
    sealed_files,
)
from control_plane.security.secret import load_secret
from tests.control_plane.harness import Aws, Installation, chat, create, ingle

SECRET = b"-----BEGIN PRIVATE KEY-----\nnot for other eyes\n-----END PRIVATE KEY-----\n"


def kms_keeper(aws: Aws) -> KmsKeeper:
    client = aws.client("kms")
    return KmsKeeper(client, client.create_key()["KeyMetadata"]["KeyId"])


@pytest.fixture(params=["local", "kms"])
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "local":
        return LocalKeeper(tmp_path / "keyring")
    return kms_keeper(request.getfixturevalue("aws"))


def test_what_is_sealed_opens_under_its_own_name_only(keeper: Any) -> None:
    keyring = Keyring(keeper)
    block = keyring.seal(SECRET, "ca.key")
    text = b"before\n" + block + b"after\n"
    assert b"eyes" not in text
    assert keyring.open(text, "ca.key") == b"before\n" + SECRET + b"after\n"
    assert Keyring(keeper).open(block, "ca.key") == SECRET
    with pytest.raises((ConfigError, Unavailable)):
        Keyring(keeper).open(block, "admin.pem")
    lines = block.splitlines(keepends=True)
    changed = lines[2].swapcase()
    assert changed != lines[2]
    with pytest.raises((ConfigError, Unavailable)):
        Keyring(keeper).open(b"".join([*lines[:2], changed, *lines[3:]]), "ca.key")


def test_a_rotated_key_seals_from_then_on_and_the_one_before_still_opens(tmp_path: Path) -> None:
    keyring, other = open_keyring(tmp_path), open_keyring(tmp_path)
    first = keyring.seal(SECRET, "x")
    other.rotate()
    assert keyring.open(first, "x") == SECRET
    second = keyring.seal(SECRET, "x")
    third = keyring.seal_again(first, "x")
    for _ in range(2):  # ends in mid-run leave no key behind that is still needed
        other.rotate()
    assert [open_keyring(tmp_path).open(one, "x") for one in (first, second, third)] == [SECRET] * 3
    other.retire()
    for one in (first, second, third):
        with pytest.raises(ConfigError, match="has no key"):
            open_keyring(tmp_path).open(one, "x")
    assert (tmp_path / "keyring").stat().st_mode & 0o777 == 0o600
    assert len(json.loads((tmp_path / "keyring").read_text())) == 2


def test_an_installation_in_the_clear_is_sealed_by_rotating(tmp_path: Path) -> None:
    before = load_secret(tmp_path, IN_THE_CLEAR).replica_token("a")
    plain = CertificateAuthority(tmp_path, 90)
    certificate = plain.ensure("admin", ["localhost"], 0.0)
    assert b"PRIVATE KEY" in certificate.path.read_bytes()
    keyring = open_keyring(tmp_path)
    _, files = rotate_keyring(tmp_path, keyring)
    assert files == 3
    assert in_the_clear(tmp_path) == []
    assert load_secret(tmp_path, open_keyring(tmp_path)).replica_token("a") == before
    sealed = CertificateAuthority(tmp_path, 90, open_keyring(tmp_path))
    assert sealed.show("admin").serial == certificate.serial
    assert sealed.renew("admin", 0.0).serial != certificate.serial
    with pytest.raises(ConfigError, match="keyring"):
        load_secret(tmp_path)


def test_a_key_service_that_is_away_is_said(tmp_path: Path) -> None:
    keyring = open_keyring(tmp_path, kms_key="k", kms_client=aws_client("kms", "eu-central-1", "http://127.0.0.1:9"))
    with pytest.raises(Unavailable, match="can't be reached"):
        keyring.seal(SECRET, "x")


def in_the_clear(home: Path) -> list[str]:
    """Files with a private key or the installation's secret that anybody who reads them can use."""
    found = [str(path) for path in home.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    return found + [str(path) for path in home.glob("secret") if len(path.read_bytes()) == 32]


def wrapped_by(home: Path) -> set[str]:
    """Ids of the KMS keys that this home needs; the server puts them before what it encrypted."""
    found = set()
    for path, _, _ in sealed_files(home):
        body = path.read_bytes().partition(b"INGLE SEALED-----\n")[2].partition(b"-----END")[0]
        found.add(base64.b64decode(json.loads(base64.b64decode(body))["key"])[:36].decode())
    return found


def test_an_installation_on_kms_moves_to_another_key_while_it_runs(aws: Aws, fresh: Installation) -> None:
    kms = aws.client("kms")
    old, new = (kms.create_key()["KeyMetadata"]["KeyId"] for _ in range(2))
    kms.create_alias(AliasName="alias/ingle", TargetKeyId=old)
    settings = {"KMS_KEY": "alias/ingle", "AWS_REGION": aws.region, "ENDPOINT_URL": aws.url}
    fresh.more = {f"INGLE_KEYRING__{name}": value for name, value in settings.items()} | dict(aws.environment)
    fresh.more |= {"INGLE_LOG_LEVEL": "debug"}
    up = fresh.up()
    with fresh.admin() as admin:
        url = create(admin, "sealed", "fast")
        key = admin.create_key({"name": "k"}).secret
        assert in_the_clear(fresh.home) == []
        kms.update_alias(AliasName="alias/ingle", TargetKeyId=new)
        done = ingle(fresh.home, "keyring", "rotate", "-o", "json", **fresh.more)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["key"] == new
        assert wrapped_by(fresh.home) == {new}
        admin.rotate_certificates(None)
    assert up.stop() == 0
    fresh.up()
    with fresh.admin() as admin, fresh.tenant(admin.endpoint("sealed").url, key) as tenant:
        assert url
        assert tenant.post("/chat/completions", json=chat(model="sealed")).status_code == 200
    assert wrapped_by(fresh.home) == {new}
    written = [path for path in fresh.home.rglob("*") if path.is_file()] + [one.errors for one in fresh.programs]
    canary = aws.environment["AWS_SECRET_ACCESS_KEY"].encode()
    assert [path for path in written if canary in path.read_bytes()] == []
    refused = ingle(fresh.home, "keyring", "rotate", **fresh.more | {"INGLE_KEYRING__KMS_KEY": "alias/none"})
    assert refused.returncode == 1
    assert "AWS KMS refused" in refused.stderr
