"""Certificates by which gateways, controllers and replicas know one another: short-lived, from the private authority.

A replica's says which replica it is and serves only; a caller's calls only, so that neither a replica's nor a gateway's
public certificate opens a replica. Both ends take up renewed ones in process; open connections go on.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.x509.oid import ExtendedKeyUsageOID

from control_plane.domain import Address
from control_plane.errors import IngleError
from control_plane.observe.logs import event
from control_plane.security.certificates import CertificateAuthority
from control_plane.security.files import write_private
from control_plane.security.sources import Pair

_RENEW_LEFT = 1 / 3
"""Renewed when this share of its lifetime is left."""
_MOST_WAIT = 60.0


@dataclass(frozen=True, slots=True)
class Link:
    """How replicas are reached: in plain HTTP, or by TLS in which both sides show who they are."""

    context: ssl.SSLContext | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.context is None else "https"

    def url(self, address: Address, path: str) -> str:
        return f"{self.scheme}://{address}{path}"

    def options(self, replica_id: str) -> dict[str, Any]:
        """What aiohttp is to be told of a request to replica `replica_id`."""
        if self.context is None:
            return {}
        return {"ssl": self.context, "server_hostname": server_name(replica_id)}


PLAIN = Link()


def server_name(replica_id: str) -> str:
    """The name in the certificate of replica `replica_id`."""
    return f"{replica_id.replace('_', '-')}.replica.ingle"


class Mesh:
    """`lifetime` of all its certificates is in seconds. `link` is this process's side of each connection."""

    def __init__(
        self, authority: CertificateAuthority, lifetime: float, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._authority = authority
        self._lifetime = lifetime
        self._clock = clock
        self._due_at = 0.0
        self._replicas_due_at: dict[Path, float] = {}
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.link = Link(context)
        self.refresh()

    @property
    def ca_file(self) -> Path:
        return self._authority.ca_file

    async def run(self) -> None:
        """Keep this process's own certificate fresh until cancelled."""
        while True:
            await asyncio.sleep(min(_MOST_WAIT, self._lifetime * _RENEW_LEFT / 4))
            try:
                # In the loop's own thread: a handshake that begins while a context changes in another one fails.
                self.refresh()
            except (IngleError, OSError, ValueError) as error:
                event("mesh.not_renewed", level=logging.ERROR, reason=str(error))

    def refresh(self) -> None:
        """Take a new certificate if this one ends soon, and whatever authority there is by now."""
        now = self._clock()
        context = self.link.context
        assert context is not None  # noqa: S101  # made above
        context.load_verify_locations(self._authority.ca_file)
        if now < self._due_at:
            return
        pem = self._issue("ingle", ["caller.ingle"], ExtendedKeyUsageOID.CLIENT_AUTH, now)
        Pair.of(pem).load_into(context, self._authority.folder)
        self._due_at = now + self._lifetime * (1 - _RENEW_LEFT)

    def equip(self, replica_id: str, host: str, path: Path) -> None:
        """Let `path` hold a certificate of replica `replica_id` with time left; cheap where it does."""
        now = self._clock()
        due_at = self._replicas_due_at.get(path)
        if due_at is None:
            due_at = Pair.of(path.read_bytes()).not_after - self._lifetime * _RENEW_LEFT if path.exists() else 0.0
        if now >= due_at:
            names = [server_name(replica_id), host]
            write_private(path, self._issue(replica_id, names, ExtendedKeyUsageOID.SERVER_AUTH, now))
            due_at = now + self._lifetime * (1 - _RENEW_LEFT)
        self._replicas_due_at[path] = due_at

    def forget(self, path: Path) -> None:
        self._replicas_due_at.pop(path, None)

    def _issue(self, subject: str, names: list[str], usage: Any, now: float) -> bytes:
        return self._authority.issue(subject, names, usage=usage, lifetime=self._lifetime, now=now)
