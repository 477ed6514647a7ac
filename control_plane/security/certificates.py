"""The private certificate authority in `HOME/certs`, and the server certificates that it issues.

`ca.pem` is what clients trust: the authority's certificate, and its predecessor's while they overlap. `ca.key` is its
key, with its own certificate and the one that its predecessor gave it: servers send that along, so that clients which
trust only the predecessor still find their way. Each server has `<name>.pem` (its chain and its key in one file, so
that the pair is always replaced together, 0600). Keys are sealed by the installation's keyring.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from control_plane.errors import ConfigError, NotFound
from control_plane.security.files import private_folder, write_private
from control_plane.security.keyring import IN_THE_CLEAR, Keyring

CA = "ca"
CA_DAYS = 3650
DAY_SECONDS = 86_400.0
RENEW_AT_SHARE = 2 / 3
"""Renewed once this share of its lifetime is over."""

_KEY_MARK = b"-----BEGIN PRIVATE KEY"
_BACKDATE = timedelta(minutes=5)  # clients' clocks differ
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Certificate:
    """What there is to say of a certificate; times in seconds since the epoch."""

    name: str
    path: Path
    serial: str
    names: tuple[str, ...]
    not_before: float
    not_after: float

    def due(self, now: float) -> bool:
        """Whether it's time to renew."""
        return now >= self.not_before + (self.not_after - self.not_before) * RENEW_AT_SHARE


class CertificateAuthority:
    """Issues and renews. Made at first use; several processes may share the folder."""

    def __init__(self, home: Path, days: int, keyring: Keyring = IN_THE_CLEAR) -> None:
        self.keyring = keyring
        self.folder = home / "certs"
        self.days = days
        try:
            private_folder(self.folder)
            with self._locked():
                if not self.ca_file.exists():
                    self._create()
        except OSError as error:
            raise ConfigError(f"{self.folder} can't be used: {error.strerror}", param="home") from None

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    def ensure(self, name: str, names: Sequence[str], now: float) -> Certificate:
        """The certificate of server `name` for host `names`, issued or renewed if that is due."""
        with self._locked():
            try:
                current = self.show(name)
                if not current.due(now) and set(names) <= set(current.names):
                    return current
            except (NotFound, ConfigError):
                pass
            return self._issue(name, names, now)

    def roll_over(self, now: float) -> Certificate:
        """Follow the authority by a new one, which its predecessor vouches for, and renew all servers' certificates.

        Clients with either `ca.pem` connect to every server from then on; the predecessor's stays in the new `ca.pem`
        until the next roll-over.
        """
        with self._locked():
            old, _, old_key = self._authority()
            key = ec.generate_private_key(ec.SECP256R1())
            own, vouched = _authority_certificate(key, now), _authority_certificate(key, now, old, old_key)
            servers = [item for item in self.list() if item.name != CA]
            write_private(self.folder / "ca.key", _pem(own) + _pem(vouched) + self._sealed(key, "ca.key"))
            self._publish(_pem(own) + _pem(old))
            for item in servers:
                self._issue(item.name, item.names, now)
        return self.show(CA)

    def renew(self, name: str, now: float) -> Certificate:
        """A new certificate for the same names. Raises NotFound."""
        with self._locked():
            return self._issue(name, self.show(name).names, now)

    def show(self, name: str) -> Certificate:
        """Raises NotFound; ConfigError where the file is damaged."""
        path = self._path(name)
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"no certificate named {name!r}: `ingle cert list` shows what there is") from None
        except x509.ExtensionNotFound:
            extension = None
        except ValueError:
            raise ConfigError(f"{path} is damaged: `ingle cert rotate {name}` makes a new one") from None
        names = () if extension is None else tuple(str(item.value) for item in extension.value)
        return Certificate(
            name=name,
            path=path,
            serial=f"{certificate.serial_number:x}",
            names=names,
            not_before=certificate.not_valid_before_utc.timestamp(),
            not_after=certificate.not_valid_after_utc.timestamp(),
        )

    def list(self) -> list[Certificate]:
        return [self.show(path.stem) for path in sorted(self.folder.glob("*.pem"))]

    def _path(self, name: str) -> Path:
        if not name.replace("-", "").replace(".", "").isalnum() or ".." in name:
            raise NotFound(f"no certificate named {name!r}: `ingle cert list` shows what there is")
        return self.folder / f"{name}.pem"

    def _create(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        own = _authority_certificate(key, time.time())
        write_private(self.folder / "ca.key", _pem(own) + self._sealed(key, "ca.key"))
        self._publish(_pem(own))

    def _publish(self, pem: bytes) -> None:
        write_private(self.ca_file, pem)
        os.chmod(self.ca_file, 0o644)  # clients must read it

    def _authority(self) -> tuple[x509.Certificate, Sequence[x509.Certificate], ec.EllipticCurvePrivateKey]:
        """The authority's certificate, those that servers send along, and its key."""
        pem = self.keyring.open((self.folder / "ca.key").read_bytes(), "ca.key")
        key = serialization.load_pem_private_key(pem[pem.index(_KEY_MARK) :], password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)  # noqa: S101  # we wrote it
        chain = pem[: pem.index(_KEY_MARK)]
        own, *along = x509.load_pem_x509_certificates(chain or self.ca_file.read_bytes())
        if own not in x509.load_pem_x509_certificates(self.ca_file.read_bytes()):  # a crash amid a roll-over
            self._publish(_pem(own) + self.ca_file.read_bytes())
        return own, along, key

    def issue(
        self, subject: str, names: Sequence[str], *, usage: x509.ObjectIdentifier, lifetime: float, now: float
    ) -> bytes:
        """A chain and its key as PEM, kept nowhere. `lifetime` is in seconds, `usage` what it is good for."""
        with self._locked():
            chain, key = self._sign(subject, names, usage, lifetime, now)
        return chain + _key_pem(key)

    def _issue(self, name: str, names: Sequence[str], now: float) -> Certificate:
        lifetime = self.days * DAY_SECONDS
        chain, key = self._sign(f"ingle {name}", names, ExtendedKeyUsageOID.SERVER_AUTH, lifetime, now)
        path = self._path(name)
        write_private(path, chain + self._sealed(key, path.name))
        return self.show(name)

    def _sign(
        self, subject: str, names: Sequence[str], usage: x509.ObjectIdentifier, lifetime: float, now: float
    ) -> tuple[bytes, ec.EllipticCurvePrivateKey]:
        ca, along, ca_key = self._authority()
        key = ec.generate_private_key(ec.SECP256R1())
        own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
        certificate = (
            _builder(own, ca.subject, key, datetime.fromtimestamp(now, UTC), timedelta(seconds=lifetime))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(item) for item in names]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        return b"".join(_pem(item) for item in (certificate, *along)), key

    def _sealed(self, key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
        return self.keyring.seal(_key_pem(key), name)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / ".lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _authority_certificate(
    key: ec.EllipticCurvePrivateKey,
    now: float,
    issuer: x509.Certificate | None = None,
    issuer_key: ec.EllipticCurvePrivateKey | None = None,
) -> x509.Certificate:
    """For an authority's `key`: its own word, or its predecessor's."""
    # An authority's name tells it from its predecessor, so that chains are found by name.
    identity = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ingle private CA {identity.digest.hex()[:8]}")])
    days = CA_DAYS
    if issuer is not None:
        days = max(1, (issuer.not_valid_after_utc - datetime.fromtimestamp(now, UTC)).days)
    signer = issuer_key or key
    return (
        _builder(
            subject, issuer.subject if issuer else subject, key, datetime.fromtimestamp(now, UTC), timedelta(days=days)
        )
        # One authority below it: its successor.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0 if issuer else 1), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .add_extension(identity, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + life)
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
