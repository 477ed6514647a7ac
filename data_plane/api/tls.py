"""Mutual TLS: callers must show a certificate of the given authority, and a renewed one of the replica is taken up.

Whoever runs the replica replaces the files; open connections go on.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from data_plane import log
from data_plane.errors import InvalidArgument

_LOOK_S = 5.0


class PeerTls:
    """`pair` holds a certificate chain and its key, `authority` the certificates that callers' are checked against."""

    def __init__(self, pair: Path, authority: Path, *, look_s: float = _LOOK_S) -> None:
        self._pair, self._authority, self._look_s = pair, authority, look_s
        self._loaded: tuple[bytes, bytes] | None = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.verify_mode = ssl.CERT_REQUIRED
        try:
            self._load()
        except OSError as error:
            raise InvalidArgument(f"--tls-pair and --tls-authority: they don't load ({error})") from None

    async def watch(self) -> None:
        """Take up what is replaced, until cancelled. What doesn't load changes nothing."""
        while True:
            await asyncio.sleep(self._look_s)
            try:
                self._load()
            except OSError as error:
                log.event("tls_not_renewed", level="error", kind=type(error).__name__)

    def _load(self) -> None:
        found = (self._pair.read_bytes(), self._authority.read_bytes())
        if found == self._loaded:
            return
        # tried on a context that serves nobody: a pair that doesn't match would spoil the one in use
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trial.load_cert_chain(self._pair)
        self.context.load_verify_locations(self._authority)
        self.context.load_cert_chain(self._pair)
        self._loaded = found
