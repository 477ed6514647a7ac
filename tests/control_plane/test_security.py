from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
import time
from pathlib import Path

import pytest

from control_plane.errors import ConfigError, NotFound
from control_plane.observe.logs import redact
from control_plane.security.certificates import CertificateAuthority
from control_plane.security.keys import make_admin_token, make_key, parse_key
from control_plane.security.secret import load_secret
from control_plane.security.sources import AuthoritySource, Pair


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    first, second = load_secret(tmp_path / "home"), load_secret(tmp_path / "home")
    assert mode(tmp_path / "home" / "secret") == 0o600
    assert first.replica_token("r") == second.replica_token("r")
    other = load_secret(tmp_path / "other")
    assert other.replica_token("r") != first.replica_token("r")
    derived = {first.replica_token("x"), first.cache_salt("x"), first.key_hash("x").hex(), first.admin_hash("x").hex()}
    assert len(derived) == 4


def test_a_damaged_or_unusable_home_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ConfigError, match="damaged"):
        load_secret(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="writable --home"):
        load_secret(tmp_path / "file" / "home")


def test_a_key_is_parsed_back_and_only_a_whole_one(tmp_path: Path) -> None:
    secret = load_secret(tmp_path)
    key = make_key(secret)
    parsed = parse_key(key.text)
    assert parsed is not None
    assert parsed[0] == key.id
    assert secret.key_hash(parsed[1]) == key.digest
    assert parsed[1] not in key.prefix
    for broken in (
        "",
        "x",
        key.text[:-1],
        key.text + "a",
        key.text.upper(),
        key.text + "\n",
        f" {key.text}",
        "ingle__",
    ):
        assert parse_key(broken) is None


def test_secrets_do_not_survive_redaction(tmp_path: Path) -> None:
    secret = load_secret(tmp_path)
    key, (token, _) = make_key(secret).text, make_admin_token(secret)
    for text in (key, token, f"Bearer {key}", "bearer abcdefgh.ijk", "sk-CANARY-1f3a9c", "postgresql://u:pa55@host/db"):
        cleaned = redact(f"before {text} after")
        for part in (key.split("_", 2)[2], token.split("_", 1)[1], "abcdefgh.ijk", "CANARY", "pa55"):
            assert part not in cleaned
        assert cleaned.startswith("before ")
        assert cleaned.endswith(" after")


def test_certificates_are_issued_kept_and_renewed_by_share_of_their_life(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path, days=90)
    now = time.time()
    first = authority.ensure("gateway-a", ["localhost", "127.0.0.1", "::1"], now)
    assert set(first.names) == {"localhost", "127.0.0.1", "::1"}
    assert authority.ensure("gateway-a", ["localhost"], now) == first
    assert authority.ensure("gateway-a", ["localhost"], now + 59 * 86_400) == first
    later = authority.ensure("gateway-a", ["localhost", "127.0.0.1"], now + 61 * 86_400)
    assert later.serial != first.serial
    more = authority.ensure("gateway-a", ["chat.local-eu.example"], now + 61 * 86_400)
    assert more.names == ("chat.local-eu.example",)
    assert authority.renew("gateway-a", now).serial != more.serial
    assert mode(tmp_path / "certs" / "ca.key") == mode(later.path) == 0o600
    assert mode(authority.ca_file) == 0o644
    assert [item.name for item in authority.list()] == ["ca", "gateway-a"]


def test_a_damaged_certificate_is_replaced_and_strange_names_are_not_paths(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path, days=90)
    path = authority.ensure("gateway-a", ["localhost"], time.time()).path
    path.write_text("-----BEGIN CERTIFICATE-----\nxx")
    with pytest.raises(ConfigError, match="rotate gateway-a"):
        authority.show("gateway-a")
    authority.ensure("gateway-a", ["localhost"], time.time())
    for name in ("../../etc/passwd", "nope", "", "a/b"):
        with pytest.raises(NotFound):
            authority.show(name)


def test_a_client_that_trusts_the_authority_completes_a_handshake(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path, days=90)
    source = AuthoritySource(authority, "gateway-a", ["localhost", "127.0.0.1"])
    source.refresh(time.time())
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    source.read().load_into(server, tmp_path)
    client = ssl.create_default_context(cafile=str(authority.ca_file))
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with server.wrap_socket(connection, server_side=True) as wrapped:
            wrapped.sendall(b"hello")

    thread = threading.Thread(target=answer)
    thread.start()
    with (
        socket.create_connection(listener.getsockname(), timeout=10) as raw,
        client.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped,
    ):
        assert wrapped.recv(5) == b"hello"
        assert wrapped.version() in ("TLSv1.2", "TLSv1.3")
    thread.join(10)
    listener.close()


def test_two_processes_agree_on_one_authority(tmp_path: Path) -> None:
    if os.fork() == 0:
        CertificateAuthority(tmp_path, days=90)
        os._exit(0)
    authority = CertificateAuthority(tmp_path, days=90)
    os.wait()
    certificate = authority.ensure("a", ["localhost"], time.time())
    context = ssl.create_default_context(cafile=str(authority.ca_file))
    assert str(context.get_ca_certs()[0]["serialNumber"]).lower().lstrip("0") == authority.show("ca").serial
    Pair.of(certificate.path.read_bytes()).check(time.time(), tmp_path)
