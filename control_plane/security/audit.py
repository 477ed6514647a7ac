"""The installation's signature on audit records. The public key lets others check an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane.chain import Record, record_hash
from control_plane.security.secret import Secret


class AuditSigner:
    def __init__(self, secret: Secret) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret.audit_seed())

    @property
    def public_key(self) -> str:
        """PEM."""
        return (
            self._key.public_key()
            .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            .decode()
        )

    def seal(self, seq: int, content: Mapping[str, Any], previous: str) -> tuple[str, str]:
        """The hash and the signature of a record."""
        digest = record_hash(seq, content, previous)
        return digest, self._key.sign(bytes.fromhex(digest)).hex()

    def signed(self, record: Record) -> bool:
        try:
            self._key.public_key().verify(bytes.fromhex(record.signature), bytes.fromhex(record.hash))
        except (InvalidSignature, ValueError):
            return False
        return True
