"""Where a server's certificate comes from. A source keeps it fresh; the listener takes up whatever it reads."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography import x509

from control_plane.errors import ConfigError
from control_plane.security.certificates import CertificateAuthority


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate chain and its key, as PEM in one piece. Times are seconds since the epoch."""

    pem: bytes
    serial: str
    not_before: float
    not_after: float

    @classmethod
    def of(cls, pem: bytes) -> Pair:
        """Raises ValueError where the first certificate in `pem` can't be read."""
        leaf = x509.load_pem_x509_certificate(pem)
        not_before, not_after = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
        return cls(pem, f"{leaf.serial_number:x}", not_before, not_after)

    def load_into(self, context: ssl.SSLContext, folder: Path) -> None:
        """Let `context` serve this pair. Raises ssl.SSLError (an OSError) where they don't belong together."""
        # The ssl module reads files only.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".pair.") as file:
            file.write(self.pem)
            file.flush()
            context.load_cert_chain(file.name)

    def check(self, now: float, folder: Path) -> None:
        """Raise ValueError or OSError unless this may be served now."""
        self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), folder)
        if self.not_after <= now:
            raise ValueError("the certificate has expired")
        if self.not_before > now:
            raise ValueError("the certificate isn't valid yet")


class CertificateSource(Protocol):
    """`read` gives what is there now. Both may block, and raise IngleError, OSError or ValueError."""

    def refresh(self, now: float) -> None:
        """Renew what is due for renewal."""

    def read(self) -> Pair:
        """The newest pair, good or bad."""


class AuthoritySource:
    """The installation's own authority, which renews by a share of the certificate's lifetime."""

    def __init__(self, authority: CertificateAuthority, name: str, names: Sequence[str]) -> None:
        self._authority = authority
        self._name = name
        self._names = tuple(names)

    def refresh(self, now: float) -> None:
        self._authority.ensure(self._name, self._names, now)

    def read(self) -> Pair:
        return Pair.of(self._authority.show(self._name).path.read_bytes())


class FilesSource:
    """Files that somebody else keeps fresh: a chain (leaf first) and its key."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key

    def refresh(self, now: float) -> None:
        pass

    def read(self) -> Pair:
        try:
            return Pair.of(self._certificate.read_bytes().rstrip() + b"\n" + self._key.read_bytes())
        except OSError as error:
            raise ConfigError(f"{error.filename} can't be read: {error.strerror}", param="certificate") from None
