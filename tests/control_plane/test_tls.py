"""Certificates are replaced under way, bad ones change nothing, and slow or greedy clients starve nobody."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from control_plane.domain import Address
from control_plane.errors import ConfigError
from control_plane.gateway.door import Door
from control_plane.listener import TlsListener
from control_plane.observe import metrics
from control_plane.security.certificates import CertificateAuthority
from control_plane.security.sources import AuthoritySource, CertificateSource, FilesSource

PATIENCE = 20.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Files:
    """A certificate and its key in two files, as somebody else's authority would leave them."""

    def __init__(self, folder: Path) -> None:
        self.authority = CertificateAuthority(folder, days=90)
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.source = FilesSource(self.certificate, self.key)
        self.serial = self.put(*self.make())

    def make(self, days: int = 90, now: float | None = None) -> tuple[bytes, bytes]:
        self.authority.days = days
        path = self.authority.ensure("files", ["localhost"], time.time()).path
        self.authority._issue("files", ["localhost"], now or time.time())
        certificate, mark, key = path.read_bytes().partition(b"-----BEGIN PRIVATE KEY")
        return certificate, mark + key

    def put(self, certificate: bytes, key: bytes) -> str:
        self.certificate.write_bytes(certificate)
        self.key.write_bytes(key)
        return serial_of(certificate)

    @property
    def ca_file(self) -> str:
        return str(self.authority.ca_file)


def serial_of(pem: bytes) -> str:
    return f"{x509.load_pem_x509_certificate(pem).serial_number:x}"


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    if request.path != "/stream":
        return web.Response(text="hello")
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"tick\n")
        await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(source: CertificateSource, folder: Path, **bounds: float) -> AsyncIterator[tuple[str, int]]:
    most, seconds = int(bounds.get("most", 1000)), bounds.get("header_seconds", PATIENCE)
    door = Door(answer, region="test", most=most, header_seconds=seconds, access_log=None, handler_cancellation=True)
    listener = TlsListener(door, Address("127.0.0.1", 0), source, "test", folder=folder, check=0.02, flag="--gateway")
    await listener.start()
    task = asyncio.create_task(listener.run())
    try:
        yield "127.0.0.1", listener.address.port
    finally:
        assert not task.done() or task.exception() is None  # nothing ends the watch
        task.cancel()
        await listener.stop(0.1)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(where: tuple[str, int], ca_file: str) -> Streams:
    context = ssl.create_default_context(cafile=ca_file)
    return await asyncio.wait_for(asyncio.open_connection(*where, ssl=context, server_hostname="localhost"), PATIENCE)


async def served(where: tuple[str, int], ca_file: str) -> str:
    _, writer = await connect(where, ca_file)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return f"{x509.load_der_x509_certificate(certificate).serial_number:x}"


async def eventually(look: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not await look():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def broken() -> float:
    return float(metrics.certificate_broken.labels("test")._value.get())


async def test_files_replaced_on_disk_are_served_and_open_streams_go_on(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with listening(files.source, tmp_path) as where:
        assert await served(where, files.ca_file) == files.serial
        streams = [await connect(where, files.ca_file) for _ in range(10)]
        for _, writer in streams:
            writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        new = files.put(*files.make(days=3))

        async def replaced() -> bool:
            return await served(where, files.ca_file) == new

        await eventually(replaced, "the new certificate is served")
        pair = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        assert metrics.certificate_not_after.labels("test")._value.get() == pair.not_valid_after_utc.timestamp()
        for reader, writer in streams:
            for _ in range(20):
                assert await asyncio.wait_for(reader.readline(), PATIENCE)
            writer.close()


async def test_no_handshake_fails_while_certificates_are_replaced(tmp_path: Path) -> None:
    files = Files(tmp_path)
    pairs = [files.make() for _ in range(8)]
    seen: set[str] = set()
    async with listening(files.source, tmp_path) as where:
        done = False

        async def clients() -> None:
            while not done:
                seen.add(await served(where, files.ca_file))

        tasks = [asyncio.create_task(clients()) for _ in range(4)]
        for certificate, key in pairs:
            serial = files.put(certificate, key)

            async def arrived(serial: str = serial) -> bool:
                return serial in seen

            await eventually(arrived, "a replaced certificate is served")
        done = True
        await asyncio.gather(*tasks)  # raises what any handshake raised
    assert len(seen) >= len(pairs)


@pytest.mark.parametrize("fault", ["mismatched", "truncated", "expired", "future", "certificate first", "gone"])
async def test_a_bad_pair_keeps_the_old_and_alarms_until_it_is_mended(tmp_path: Path, fault: str) -> None:
    files = Files(tmp_path)
    async with listening(files.source, tmp_path) as where:
        certificate, key = files.make()
        _, other_key = files.make()
        if fault == "mismatched":
            files.put(certificate, other_key)
        elif fault == "truncated":
            files.certificate.write_bytes(certificate[:300])
        elif fault == "expired":
            files.put(*files.make(days=1, now=time.time() - 3 * 86_400))
        elif fault == "future":
            files.put(*files.make(now=time.time() + 86_400))
        elif fault == "certificate first":
            files.certificate.write_bytes(certificate)
        else:
            files.key.unlink()

        async def alarmed() -> bool:
            return broken() == 1

        async def mended() -> bool:
            return await served(where, files.ca_file) == new and broken() == 0

        await eventually(alarmed, "the gauge says that something is wrong")
        assert await served(where, files.ca_file) == files.serial
        new = files.put(certificate, key)  # for "certificate first": the key, later
        await eventually(mended, "a good pair is taken up")


async def test_a_listener_does_not_start_on_a_bad_pair(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for put in ((b"", b""), (files.make()[0], files.make()[1]), files.make(days=1, now=time.time() - 3 * 86_400)):
        files.put(*put) if put[0] else files.certificate.write_bytes(b"")
        with pytest.raises(ConfigError, match="has no certificate to serve"):
            async with listening(files.source, tmp_path):
                pass


async def test_half_open_handshakes_and_plain_http_starve_nobody(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with listening(files.source, tmp_path) as where:
        half_open = [(await asyncio.open_connection(*where))[1] for _ in range(500)]
        for writer in half_open[::2]:
            writer.write(b"\x16\x03\x01\x02\x00")  # the beginning of a hello
        reader, plain = await asyncio.open_connection(*where)
        plain.write(GET)
        assert b"200" not in await asyncio.wait_for(reader.read(), PATIENCE)
        reader, writer = await connect(where, files.ca_file)
        writer.write(GET)
        assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 200")
        for one in (*half_open, plain, writer):
            one.close()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
async def test_old_versions_of_tls_are_refused(tmp_path: Path, version: ssl.TLSVersion) -> None:
    files = Files(tmp_path)
    context = ssl.create_default_context(cafile=files.ca_file)
    context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    async with listening(files.source, tmp_path) as where:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(*where, ssl=context, server_hostname="localhost")


async def test_headers_that_do_not_come_end_a_connection(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with listening(files.source, tmp_path, header_seconds=0.3) as where:
        silent = await connect(where, files.ca_file)
        slow = await connect(where, files.ca_file)
        slow[1].write(GET)
        assert (await slow[0].readline()).startswith(b"HTTP/1.1 200")
        await slow[0].readuntil(b"hello")
        slow[1].write(GET[:20])  # the second request's headers stop
        for reader, writer in (silent, slow):
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            writer.close()
        streaming = await connect(where, files.ca_file)
        streaming[1].write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(60):  # twice as long as headers may take
            assert await streaming[0].readline()
        streaming[1].close()


async def test_connections_are_bounded(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with listening(files.source, tmp_path, most=5) as where:
        held = [await connect(where, files.ca_file) for _ in range(5)]

        async def admitted() -> bool:
            try:
                reader, writer = await connect(where, files.ca_file)
                writer.write(GET)
                line = await reader.readline()
            except (ConnectionError, ssl.SSLError):
                return False
            writer.close()
            return line.startswith(b"HTTP/1.1 200")

        assert not await admitted()
        held[0][1].close()
        await eventually(admitted, "a place is free again")
        for _, writer in held:
            writer.close()


async def test_an_authority_is_followed_by_another_and_clients_of_both_connect(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path / "home", days=90)
    source = AuthoritySource(authority, "gateway-a", ["localhost"])
    async with listening(source, tmp_path) as where:
        first = tmp_path / "first.pem"
        first.write_bytes(authority.ca_file.read_bytes())
        before = await served(where, str(first))
        rolled = authority.roll_over(time.time())
        assert rolled.serial != serial_of(first.read_bytes())

        async def renewed() -> bool:
            return await served(where, str(first)) != before

        await eventually(renewed, "the new authority's certificate is served, and the old clients still connect")
        newest = tmp_path / "newest.pem"
        newest.write_bytes(
            x509.load_pem_x509_certificates(authority.ca_file.read_bytes())[0].public_bytes(Encoding.PEM)
        )
        assert await served(where, str(newest)) == authority.show("gateway-a").serial
        # A crash right after the key was replaced: what clients are given is made good.
        authority.ca_file.write_bytes(first.read_bytes())
        authority.renew("gateway-a", time.time())
        assert serial_of(authority.ca_file.read_bytes()) == rolled.serial
        second = tmp_path / "second.pem"
        second.write_bytes(authority.ca_file.read_bytes())
        authority.roll_over(time.time())
        assert await served(where, str(second))
        assert [item.name for item in authority.list()] == ["ca", "gateway-a"]
