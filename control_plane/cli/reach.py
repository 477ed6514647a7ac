"""What `ingle doctor` asks of an installation that runs: listeners, their certificates and clocks, the admin API."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509

from control_plane.cli.checks import Check, Status, skew
from control_plane.domain import Address

if TYPE_CHECKING:
    from control_plane.config import Settings

_TIMEOUT = 5.0
_ANY_HOST = ("0.0.0.0", "::")


def listeners(settings: Settings) -> Iterator[Check]:
    """The admin API's and each gateway's address: free, ours, or somebody else's."""
    ca_file = settings.home / "certs" / "ca.pem"
    places = [("admin", Address.parse(settings.admin), True)]
    places += [
        (
            f"gateway {region.name}",
            settings.gateway_address(region.name),
            region.certificate is None and region.acme is None,
        )
        for region in settings.regions
    ]
    for name, address, ours in places:
        yield from _listener(name, address, ca_file if ours else None)
    for region in settings.regions:
        if region.acme is not None and region.acme.challenge == "http-01":
            address = Address.parse(region.acme.http)
            taken = _bind_fault(address)
            status: Status = "warn" if taken else "ok"
            yield Check(name="acme", status=status, found=f"{address}: {taken or 'free'}",
                        do="fine if that is ingle; else stop what listens there" if taken else "")  # fmt: skip


def _listener(name: str, address: Address, ca_file: Path | None) -> Iterator[Check]:
    host = "127.0.0.1" if address.host in _ANY_HOST else address.host
    fault = _bind_fault(address)
    if fault is None:
        yield Check(name=name, status="ok", found=f"{address} is free")
        return
    if fault != "in use":
        yield Check(
            name=name,
            status="fail",
            found=f"{address}: {fault}",
            do="choose an address of this machine, or a port above 1023",
        )
        return
    try:
        served, status, date = _ask(host, address.port)
    except (OSError, http.client.HTTPException):
        status, served, date = 0, None, None
    if status != 200 or served is None:
        do = "stop what listens there, or choose another address in ingle.toml"
        yield Check(name=name, status="fail", found=f"{address} is taken by something that isn't ingle", do=do)
        return
    yield Check(name=name, status="ok", found=f"{address} answers")
    yield certificate(name, served, ca_file, time.time())
    if date is not None:
        # an HTTP date has whole seconds
        yield skew(name, parsedate_to_datetime(date).timestamp() + 0.5 - time.time(), exact=1.0)


def certificate(name: str, served: bytes, ca_file: Path | None, now: float) -> Check:
    """How long a served certificate (DER) lasts, and whether the installation's authority stands behind it."""
    found = x509.load_der_x509_certificate(served)
    begins, ends = found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    left = (ends - now) / 86_400
    text = f"{name}: ends in {left:.1f} days"
    if not begins - 60 <= now < ends:
        return Check(
            name="certificate",
            status="fail",
            found=f"{name}: not valid now",
            do="`ingle cert rotate`, or mend the clock",
        )
    if ca_file is not None and ca_file.exists() and not _vouched(found, ca_file):
        do = "the process that listens there belongs to another home: give --home, or restart it"
        return Check(name="certificate", status="fail", found=f"{name}: not of the authority in {ca_file}", do=do)
    if ends - now < (ends - begins) / 4:
        do = "it should have been renewed: see `ingle cert list` and the log's certificate.fault"
        return Check(name="certificate", status="warn", found=text, do=do)
    return Check(name="certificate", status="ok", found=text)


def admin(settings: Settings) -> Iterator[Check]:
    """Whether the profile opens the admin API, and what that says of the regions."""
    from control_plane.client import AdminClient
    from control_plane.errors import ConfigError, Unavailable
    from control_plane.profile import read_profile

    try:
        with AdminClient(read_profile(settings.home / "profile.toml")) as client:
            status = client.status()
            yield Check(name="admin API", status="ok", found=f"ingle {status.version} answers")
            for region in client.regions():
                silent = region.gateway != "up"
                do = f"start it: `ingle serve gateway --region {region.name}`" if silent else ""
                yield Check(
                    name=f"region {region.name}",
                    status="warn" if silent else "ok",
                    found=f"gateway {region.gateway}",
                    do=do,
                )
    except ConfigError as error:
        yield Check(name="admin API", status="warn", found=error.message, do="start the platform: `ingle up`")
    except Unavailable as error:
        yield Check(name="admin API", status="warn", found=error.message, do="start the platform: `ingle up`")


def _bind_fault(address: Address) -> str | None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
    return None


def _ask(host: str, port: int) -> tuple[bytes | None, int, str | None]:
    """The certificate that is served there, the status of its /livez, and the time by its clock."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # what is wrong with it is to be said, not to end this
    connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT, context=context)
    try:
        connection.connect()
        served = connection.sock.getpeercert(binary_form=True)
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        return served, answer.status, answer.getheader("Date")
    finally:
        connection.close()


def _vouched(found: x509.Certificate, ca_file: Path) -> bool:
    for authority in x509.load_pem_x509_certificates(ca_file.read_bytes()):
        try:
            found.verify_directly_issued_by(authority)
        except Exception:  # noqa: S112  # whatever is wrong, this one didn't issue it
            continue
        return True
    return False
