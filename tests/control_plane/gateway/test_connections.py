"""TLS as tenants meet it."""

from __future__ import annotations

import socket
import ssl

import httpx
import pytest

from control_plane.client import AdminClient
from tests.control_plane.harness import Installation, until


def test_certificates_are_replaced_under_way(platform: Installation, admin: AdminClient, eu: str) -> None:
    url = httpx.URL(eu)
    path = platform.home / "certs" / "gateway-local-eu.pem"

    def served() -> str:
        context = ssl.create_default_context(cafile=platform.ca_file)
        with (
            socket.create_connection((url.host, url.port or 443), timeout=20) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as wrapped,
        ):
            certificate = wrapped.getpeercert()
            assert certificate is not None
            return str(certificate["serialNumber"]).lower().lstrip("0")

    before = served()
    (renewed,) = [c for c in admin.rotate_certificates(None) if c.name == "gateway-local-eu"]
    assert renewed.serial != before
    until(lambda: served() == renewed.serial, "the new certificate is served")
    path.write_bytes(path.read_bytes()[:400])
    until(lambda: served() != renewed.serial, "our own authority replaces a damaged one")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_tls_and_plain_http_are_refused(eu: str) -> None:
    url = httpx.URL(eu)
    where = (url.host, url.port or 443)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version, context.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_1
    with socket.create_connection(where, timeout=20) as raw, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(raw, server_hostname="localhost")
    with socket.create_connection(where, timeout=20) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        raw.settimeout(20)
        assert b"200 OK" not in raw.recv(4096)
