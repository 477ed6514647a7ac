"""A TLS listener whose certificate is renewed and replaced under way, without touching open connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
import time
from collections.abc import Callable, Sequence

from aiohttp import web

from control_plane.domain import Address
from control_plane.errors import ConfigError, IngleError
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.security.certificates import Certificate, CertificateAuthority, server_context

_HANDSHAKE_SECONDS = 10.0
_BACKLOG = 2048


class TlsListener:
    """Serves `server` at `address` with certificate `name` for host `names`.

    `check` is how often, in seconds, the certificate file is looked at. `address` tells the real port once started.
    """

    def __init__(
        self,
        server: web.Server,
        address: Address,
        authority: CertificateAuthority,
        name: str,
        names: Sequence[str],
        *,
        check: float,
        flag: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.address = address
        self._server = server
        self._authority = authority
        self._name = name
        self._names = tuple(names)
        self._check = check
        self._flag = flag
        self._clock = clock
        self._listening: asyncio.Server | None = None
        self._context: ssl.SSLContext | None = None
        self._stamp: tuple[int, int] | None = None

    async def start(self) -> None:
        """Bind. Raises ConfigError where the address can't be had."""
        certificate = self._authority.ensure(self._name, self._names, self._clock())
        self._context = server_context(certificate.path)
        self._stamp = _stamp(certificate)
        metrics.certificate_not_after.labels(self._name).set(certificate.not_after)
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                self._server,
                self.address.host,
                self.address.port,
                ssl=self._context,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
                backlog=_BACKLOG,
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                message = f"{self.address} is in use: stop what listens there or choose another {self._flag}"
                raise ConfigError(message, code="port_in_use", param=self._flag.lstrip("-")) from None
            message = f"can't listen at {self.address} ({error.strerror}): choose another {self._flag}"
            raise ConfigError(message, code="cannot_listen", param=self._flag.lstrip("-")) from None
        self.address = Address(self.address.host, self._listening.sockets[0].getsockname()[1])

    async def run(self) -> None:
        """Renew the certificate when due and take up a replaced one, until cancelled."""
        while True:
            await asyncio.sleep(self._check)
            try:
                self._refresh()
            except (IngleError, OSError, ValueError) as error:
                metrics.certificate_faults.labels(self._name).inc()
                event("certificate.fault", level=logging.ERROR, certificate=self._name, reason=str(error))

    def _refresh(self) -> None:
        certificate = self._authority.show(self._name)
        if certificate.due(self._clock()):
            certificate = self._authority.ensure(self._name, self._names, self._clock())
        stamp = _stamp(certificate)
        if stamp == self._stamp or self._context is None:
            return
        # A pair that doesn't load is found out on a context that serves nobody.
        server_context(certificate.path)
        if certificate.not_after <= self._clock():
            raise ValueError("the certificate file holds one that has expired")
        self._context.load_cert_chain(certificate.path)
        self._stamp = stamp
        metrics.certificate_not_after.labels(self._name).set(certificate.not_after)
        event("certificate.loaded", certificate=self._name, serial=certificate.serial)

    async def stop(self, grace: float) -> None:
        """Stop accepting, let open requests end for `grace` seconds, then cut them."""
        if self._listening is not None:
            self._listening.close()
            self._server.pre_shutdown()
            await self._server.shutdown(grace)


def _stamp(certificate: Certificate) -> tuple[int, int]:
    status = certificate.path.stat()
    return status.st_mtime_ns, status.st_ino
