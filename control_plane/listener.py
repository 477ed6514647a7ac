"""A TLS listener whose certificate is renewed and replaced under way, without touching open connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from control_plane.domain import Address
from control_plane.errors import ConfigError, IngleError
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.security.sources import CertificateSource, Pair

_HANDSHAKE_SECONDS = 10.0
_BACKLOG = 2048


class TlsListener:
    """Serves `server` at `address` with the pair of `source`, known as `name` in metrics and logs.

    `check` is how often, in seconds, the source is looked at; `folder` is private, for files that live for a moment.
    `address` tells the real port once started.
    """

    def __init__(
        self,
        server: web.Server,
        address: Address,
        source: CertificateSource,
        name: str,
        *,
        folder: Path,
        check: float,
        flag: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.address = address
        self._server = server
        self._source = source
        self._name = name
        self._folder = folder
        self._check = check
        self._flag = flag
        self._clock = clock
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._listening: asyncio.Server | None = None
        self._served: Pair | None = None
        self._fault: str | None = None

    async def start(self) -> None:
        """Bind. Raises ConfigError where there is no certificate to serve or the address can't be had."""
        await self._look()
        if self._served is None:
            raise ConfigError(f"{self._name} has no certificate to serve: {self._fault}", param="certificate")
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
        """Take up renewed and replaced certificates until cancelled. What can't be served changes nothing."""
        while True:
            await asyncio.sleep(self._check)
            await self._look()

    async def _look(self) -> None:
        fault = None
        try:
            pair = await asyncio.to_thread(self._fresh_pair)
            if self._served is None or pair.pem != self._served.pem:
                self._serve(pair)
        except (IngleError, OSError, ValueError) as error:
            fault = _reason(error)
            metrics.certificate_faults.labels(self._name).inc()
        if fault != self._fault:
            self._fault = fault
            metrics.certificate_broken.labels(self._name).set(fault is not None)
            if fault is not None:
                event("certificate.fault", level=logging.ERROR, certificate=self._name, reason=fault)
            else:
                event("certificate.mended", certificate=self._name)

    def _fresh_pair(self) -> Pair:
        """What the source has now; what is wrong with it is found out on a context that serves nobody."""
        fault = None
        try:
            self._source.refresh(self._clock())
        except (IngleError, OSError, ValueError) as error:
            fault = error
        pair = self._source.read()
        if self._served is None or pair.pem != self._served.pem:
            pair.check(self._clock(), self._folder)
        elif fault is not None:
            # A renewal that failed leaves what there is to be served.
            raise fault
        return pair

    def _serve(self, pair: Pair) -> None:
        # In the loop's own thread: a handshake that begins while a context changes in another one fails.
        pair.load_into(self._context, self._folder)
        self._served = pair
        metrics.certificate_not_after.labels(self._name).set(pair.not_after)
        metrics.certificate_not_before.labels(self._name).set(pair.not_before)
        event("certificate.loaded", certificate=self._name, serial=pair.serial)

    async def stop(self, grace: float) -> None:
        """Stop accepting, let open requests end for `grace` seconds, then cut them."""
        if self._listening is not None:
            self._listening.close()
            self._server.pre_shutdown()
            await self._server.shutdown(grace)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"the certificate and its key don't load ({error.reason or 'unreadable'})"
    return str(error)
