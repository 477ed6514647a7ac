"""Certificates from a real ACME server: Debian's pebble, which asks our responder over HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cryptography import x509

from control_plane.domain import Address
from control_plane.gateway.challenges import ChallengeResponder
from control_plane.security.acme import AcmeClient
from control_plane.security.certificates import CertificateAuthority
from control_plane.security.challenges import AcmeError, FileSolver, Route53Solver
from control_plane.security.keyring import open_keyring
from control_plane.security.sources import AcmeSource, AuthoritySource
from tests.control_plane.harness import Aws, Installation, free_port, until
from tests.control_plane.name_server import NameServer


@dataclass
class Pebble:
    directory: str
    ca_file: Path
    http_port: int
    management: str

    def root(self) -> bytes:
        """The authority that its certificates come from, which is another at each start."""
        with httpx.Client(verify=ssl.create_default_context(cafile=self.ca_file), trust_env=False) as client:
            return client.get(f"{self.management}/roots/0").content


@pytest.fixture(scope="module")
def pebble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pebble]:
    with authority(tmp_path_factory.mktemp("pebble")) as found:
        yield found


@contextmanager
def authority(folder: Path, *flags: str) -> Iterator[Pebble]:
    """A running pebble."""
    program = shutil.which("pebble")
    if program is None:
        pytest.skip("the ACME test server pebble isn't installed")
    own = CertificateAuthority(folder, days=2)
    pem = own.ensure("pebble", ["localhost", "127.0.0.1"], time.time()).path
    port, management, http_port = free_port(), free_port(), free_port()
    settings = {
        "listenAddress": f"127.0.0.1:{port}",
        "managementListenAddress": f"127.0.0.1:{management}",
        "certificate": str(pem),
        "privateKey": str(pem),
        "httpPort": http_port,
        "tlsPort": free_port(),
    }
    (folder / "config.json").write_text(json.dumps({"pebble": settings}))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, "-config", str(folder / "config.json"), *flags],
            stdout=log,
            stderr=log,
            env={"PEBBLE_VA_NOSLEEP": "1", "PEBBLE_WFE_NONCEREJECT": "30", "PATH": "/usr/bin"},
        )
    directory = f"https://localhost:{port}/dir"

    def up() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            context = ssl.create_default_context(cafile=own.ca_file)
            return httpx.get(directory, verify=context, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        until(up, "pebble is up")
        yield Pebble(directory, own.ca_file, http_port, f"https://localhost:{management}")
    finally:
        process.kill()
        process.wait(10)


async def test_a_certificate_is_obtained_kept_and_renewed(pebble: Pebble, tmp_path: Path) -> None:
    folder = tmp_path / "acme"
    solver = FileSolver(folder / "challenges")

    def client() -> AcmeClient:
        return AcmeClient(pebble.directory, folder, solver, email="ops@example.com", ca_file=pebble.ca_file)

    fallback = AuthoritySource(CertificateAuthority(tmp_path, days=90), "gateway-a", ["localhost"])
    source = AcmeSource(client, folder / "a.pem", ["localhost"], fallback)
    responder = ChallengeResponder(solver.folder, Address("127.0.0.1", pebble.http_port))
    now = time.time()
    # Nobody answers yet: the fallback is served, and the next try is some time off.
    with pytest.raises(AcmeError, match="refused"):
        await asyncio.to_thread(source.refresh, now)
    before = source.read()
    with pytest.raises(AcmeError, match="refused"):
        await asyncio.to_thread(source.refresh, now + 299)
    assert source.read() == before
    await responder.start()
    try:
        await asyncio.to_thread(source.refresh, now + 301)
        first = source.read()
        assert first.serial != before.serial
        leaf = x509.load_pem_x509_certificate(first.pem)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["localhost"]
        first.check(time.time(), tmp_path)
        await asyncio.to_thread(source.refresh, now + 302)
        assert source.read() == first
        account = (folder / "account.key").read_bytes()
        await asyncio.to_thread(source.refresh, first.not_after - 3600)
        assert source.read().serial != first.serial
        assert (folder / "account.key").read_bytes() == account
        assert list((folder / "challenges").iterdir()) == []
    finally:
        await responder.close()


def test_names_are_proven_in_the_dns(aws: Aws, tmp_path: Path) -> None:
    route53 = aws.client("route53")
    (old, zone, _) = (
        route53.create_hosted_zone(Name=name, CallerReference=name)["HostedZone"]["Id"]
        for name in ("example.com.", "eu.example.com.", "other.org.")
    )
    names = NameServer(route53)
    solver = Route53Solver(route53, poll=0.1)
    folder = tmp_path / "acme"
    keyring = open_keyring(tmp_path)
    fallback = AuthoritySource(CertificateAuthority(tmp_path, days=90), "gateway-a", ["localhost"])
    wanted = ["eu.example.com", "*.eu.example.com"]

    def records(of: str) -> list[str]:
        found = route53.list_resource_record_sets(HostedZoneId=of)["ResourceRecordSets"]
        return [one["Name"] for one in found if one["Type"] == "TXT"]

    try:
        with authority(tmp_path / "pebble", "-dnsserver", f"127.0.0.1:{names.port}") as pebble:

            def client() -> AcmeClient:
                return AcmeClient(pebble.directory, folder, solver, ca_file=pebble.ca_file, keyring=keyring)

            source = AcmeSource(client, folder / "a.pem", wanted, fallback, keyring=keyring)
            source.refresh(time.time())
            pair = source.read()
            pair.check(time.time(), tmp_path)
            leaf = x509.load_pem_x509_certificate(pair.pem)
            shown = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            assert sorted(shown.get_values_for_type(x509.DNSName)) == sorted(wanted)
            assert names.asked.count("_acme-challenge.eu.example.com") >= 2
            assert records(zone) == records(old) == []  # taken away again
            for kept in ("a.pem", "account.key"):
                assert b"PRIVATE KEY" not in (folder / kept).read_bytes()
            with client() as stranger, pytest.raises(AcmeError, match=r"no public zone for nowhere\.net"):
                stranger.obtain(["nowhere.net"])
    finally:
        names.close()


async def test_only_challenges_are_answered(tmp_path: Path) -> None:
    (tmp_path / "challenges").mkdir()
    (tmp_path / "challenges" / "tok-en_1").write_text("answer")
    (tmp_path / "secret").write_text("secret")
    responder = ChallengeResponder(tmp_path / "challenges", Address("127.0.0.1", 0))
    await responder.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{responder.address}") as client:
            found = await client.get("/.well-known/acme-challenge/tok-en_1")
            assert (found.status_code, found.text) == (200, "answer")
            for path in ("/", "/.well-known/acme-challenge/", "/.well-known/acme-challenge/..%2fsecret", "/tok-en_1"):
                assert (await client.get(path)).status_code == 404
    finally:
        await responder.close()


def test_a_gateway_gets_its_certificate_from_acme(pebble: Pebble, fresh: Installation, tmp_path: Path) -> None:
    acme = {
        "directory": pebble.directory,
        "names": ["localhost"],
        "http": f"127.0.0.1:{pebble.http_port}",
        "ca_file": str(pebble.ca_file),
    }
    fresh.more = {"INGLE_REGIONS": json.dumps([{"name": "local-eu", "acme": acme}])}
    root = fresh.up().facts["gateways"]["local-eu"].replace("127.0.0.1", "localhost")
    trusted = tmp_path / "pebble.pem"
    trusted.write_bytes(pebble.root())
    context = ssl.create_default_context(cafile=trusted)

    def served() -> bool:
        try:
            return httpx.get(f"{root}/livez", verify=context, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    until(served, "the certificate of the ACME authority is served")
