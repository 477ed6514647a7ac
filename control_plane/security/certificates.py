"""The private certificate authority in `HOME/certs`, and the server certificates that it issues.

`ca.pem` is what clients trust. Each server has `<name>.pem` (its chain and its key in one file, so that the pair is
always replaced together, 0600).
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import ssl
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

CA_DAYS = 3650
RENEW_AT_SHARE = 2 / 3
"""Renewed once this share of its lifetime is over."""

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

    def __init__(self, home: Path, days: int) -> None:
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
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ingle private CA")])
        now = datetime.now(UTC)
        certificate = (
            _builder(subject, subject, key, now, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(sign_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        write_private(self.folder / "ca.key", _key_pem(key))
        write_private(self.ca_file, certificate.public_bytes(serialization.Encoding.PEM))
        os.chmod(self.ca_file, 0o644)  # clients must read it

    def _issue(self, name: str, names: Sequence[str], now: float) -> Certificate:
        ca = x509.load_pem_x509_certificate(self.ca_file.read_bytes())
        ca_key = serialization.load_pem_private_key((self.folder / "ca.key").read_bytes(), password=None)
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey)  # noqa: S101  # we wrote it
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ingle {name}")])
        certificate = (
            _builder(subject, ca.subject, key, datetime.fromtimestamp(now, UTC), self.days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(item) for item in names]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        write_private(self._path(name), certificate.public_bytes(serialization.Encoding.PEM) + _key_pem(key))
        return self.show(name)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / ".lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def server_context(path: Path) -> ssl.SSLContext:
    """A TLS context for a server on the certificate file at `path`: TLS 1.2 or newer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(path)
    return context


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + timedelta(days=days))
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


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
