"""Replicas are reached by mutual TLS: who shows no certificate of a caller gets nowhere, and renewals cut nothing."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from control_plane.domain import Address
from control_plane.security.certificates import CertificateAuthority
from control_plane.security.keyring import open_keyring
from control_plane.security.mesh import Mesh, server_name
from tests.control_plane.harness import Installation, chat, create, until

LIFETIME = 6.0


@pytest.fixture
def meshed(fresh: Installation) -> Installation:
    fresh.more = {"INGLE_REPLICA_TLS": "true", "INGLE_REPLICA_CERTIFICATE_SECONDS": str(LIFETIME)}
    fresh.up()
    return fresh


def replica_of(installation: Installation, name: str) -> tuple[str, Address]:
    with installation.admin() as admin:
        (found,) = [one for one in admin.endpoint(name).replicas if one.state == "ready"]
    assert found.address
    return found.id, Address.parse(found.address)


def caller(installation: Installation) -> ssl.SSLContext:
    context = Mesh(CertificateAuthority(installation.home, 90, open_keyring(installation.home)), 60.0).link.context
    assert context is not None
    return context


def served(installation: Installation, replica: tuple[str, Address]) -> int:
    """The serial of the certificate that a replica shows to a caller."""

    async def look() -> int:
        _, writer = await asyncio.open_connection(
            replica[1].host, replica[1].port, ssl=caller(installation), server_hostname=server_name(replica[0])
        )
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return x509.load_der_x509_certificate(shown).serial_number

    return asyncio.run(look())


async def health(address: Address, context: ssl.SSLContext | None, name: str | None) -> int:
    url = f"{'https' if context else 'http'}://{address}/health"
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
        session.get(url, ssl=context if context else True, server_hostname=name) as response,
    ):
        return response.status


def with_pair(ca_file: str, pair: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    if pair is not None:
        context.load_cert_chain(pair)
    return context


def test_only_callers_of_this_installation_reach_a_replica(meshed: Installation, tmp_path: Path) -> None:
    with meshed.admin() as admin:
        url = create(admin, "closed", "fast")
        key = admin.create_key({"name": "k"}).secret
    with meshed.tenant(url, key) as tenant:
        assert tenant.post("/chat/completions", json=chat(model="closed")).status_code == 200
    replica_id, address = replica_of(meshed, "closed")
    name = server_name(replica_id)
    assert asyncio.run(health(address, caller(meshed), name)) == 200
    stranger = CertificateAuthority(tmp_path / "other", 90)
    strange = tmp_path / "strange.pem"
    usage = ExtendedKeyUsageOID.CLIENT_AUTH
    strange.write_bytes(stranger.issue("ingle", ["caller.ingle"], usage=usage, lifetime=60, now=time.time()))
    public = tmp_path / "public.pem"
    kept = meshed.home / "certs" / "gateway-local-eu.pem"
    public.write_bytes(open_keyring(meshed.home).open(kept.read_bytes(), kept.name))
    wrong = {
        "no certificate": (with_pair(meshed.ca_file, None), name),
        "another authority's": (with_pair(meshed.ca_file, strange), name),
        "the gateway's public one": (with_pair(meshed.ca_file, public), name),
        "the replica's own": (with_pair(meshed.ca_file, meshed.home / "replicas" / replica_id / "tls.pem"), name),
        "for another replica": (caller(meshed), server_name("rep_other")),
        "in the clear": (None, None),
    }
    for what, (context, asked) in wrong.items():
        with pytest.raises(aiohttp.ClientError):
            pytest.fail(f"{what}: {asyncio.run(health(address, context, asked))}")


def test_renewals_at_both_ends_and_a_new_authority_cut_nothing(meshed: Installation) -> None:
    with meshed.admin() as admin:
        url = create(admin, "renewed", "pace-50ms", idle_timeout=600)
        key = admin.create_key({"name": "k"}).secret
        replica = replica_of(meshed, "renewed")
        first = served(meshed, replica)
        body = chat(model="renewed", stream=True, max_tokens=240)
        with meshed.tenant(url, key) as tenant, tenant.stream("POST", "/chat/completions", json=body) as stream:
            until(lambda: served(meshed, replica) not in (first, 0), "the replica serves a renewed certificate")
            second = served(meshed, replica)
            admin.rotate_certificates("ca")
            until(lambda: served(meshed, replica) not in (first, second), "… and one of the new authority")
            # Longer than the first certificates live: what connects now does so with renewed ones.
            until(lambda: time.time() > ends(meshed, replica[0]) - LIFETIME / 2, "time passes")
            for _ in range(20):
                assert tenant.post("/chat/completions", json=chat(model="renewed", max_tokens=1)).status_code == 200
            lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        assert len([line for line in lines if '"content"' in line]) == 240
        assert replica_of(meshed, "renewed") == replica


def ends(installation: Installation, replica_id: str) -> float:
    pem = (installation.home / "replicas" / replica_id / "tls.pem").read_bytes()
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
