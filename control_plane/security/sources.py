"""Where a server's certificate comes from. A source keeps it fresh; the listener takes up whatever it reads."""

from __future__ import annotations

import fcntl
import ssl
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography import x509

from control_plane.errors import ConfigError
from control_plane.security.acme import AcmeClient, Issued
from control_plane.security.certificates import RENEW_AT_SHARE, CertificateAuthority
from control_plane.security.challenges import AcmeError
from control_plane.security.files import private_folder, write_private
from control_plane.security.keyring import IN_THE_CLEAR, Keyring


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
        path = self._authority.show(self._name).path
        return Pair.of(self._authority.keyring.open(path.read_bytes(), path.name))


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


class AcmeSource:
    """An ACME authority. Until it has given a certificate, `fallback` is served, so that a gateway starts without it.

    Several processes on one home share what one of them obtained. A failure stays one for `patience` seconds,
    and is tried again after that.
    """

    def __init__(
        self,
        make_client: Callable[[], AcmeClient],
        path: Path,
        names: Sequence[str],
        fallback: CertificateSource,
        *,
        keyring: Keyring = IN_THE_CLEAR,
        patience: float = 300.0,
    ) -> None:
        self._keyring = keyring
        self._make_client = make_client
        self._path = private_folder(path.parent) / path.name
        self._names = tuple(names)
        self._fallback = fallback
        self._patience = patience
        self._retry_at = 0.0
        self._failure: AcmeError | None = None

    def refresh(self, now: float) -> None:
        self._fallback.refresh(now)
        if not self._due(now):
            self._failure = None
            return
        if self._failure is not None and now < self._retry_at:
            raise self._failure
        try:
            with open(self._path.with_suffix(".lock"), "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._due(now):  # nobody else got one meanwhile
                    with self._make_client() as client:
                        self._keep(client.obtain(self._names))
            self._failure = None
        except AcmeError as error:
            self._failure, self._retry_at = error, now + self._patience
            raise

    def read(self) -> Pair:
        if not self._path.exists():
            return self._fallback.read()
        return Pair.of(self._keyring.open(self._path.read_bytes(), self._path.name))

    def _keep(self, issued: Issued) -> None:
        write_private(self._path, issued.chain + self._keyring.seal(issued.key, self._path.name))

    def _due(self, now: float) -> bool:
        try:
            pair = Pair.of(self._path.read_bytes())
        except (OSError, ValueError):
            return True
        return now >= pair.not_before + (pair.not_after - pair.not_before) * RENEW_AT_SHARE
