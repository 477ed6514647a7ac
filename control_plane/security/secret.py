"""The installation's secret, and what is derived from it.

One sealed file, `HOME/secret` (0600), from which HMAC-SHA256 makes a key for each purpose: nothing derived is stored.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from control_plane.errors import ConfigError
from control_plane.security.files import create_private, private_folder
from control_plane.security.keyring import IN_THE_CLEAR, Keyring

_BYTES = 32


class Secret:
    """Derives tokens, salts and signatures. Its value never leaves this object."""

    def __init__(self, value: bytes) -> None:
        self._keys = {
            purpose: hmac.digest(value, purpose.encode(), "sha256")
            for purpose in ("api-key", "admin-token", "replica-token", "cache-salt", "snapshot", "audit", "metrics")
        }

    def key_hash(self, secret: str) -> bytes:
        """What is stored of an API key's secret part."""
        return hmac.digest(self._keys["api-key"], secret.encode(), "sha256")

    def admin_hash(self, token: str) -> bytes:
        """What is stored of an admin token."""
        return hmac.digest(self._keys["admin-token"], token.encode(), "sha256")

    def replica_token(self, replica_id: str) -> str:
        """The bearer token that replica `replica_id` asks of its callers."""
        return hmac.digest(self._keys["replica-token"], replica_id.encode(), "sha256").hex()

    def cache_salt(self, tenant_id: str) -> str:
        """Keeps tenants' prefix caches apart."""
        return hmac.digest(self._keys["cache-salt"], tenant_id.encode(), "sha256").hex()

    def metrics_token(self) -> str:
        """The bearer token by which the controller reads a gateway's metrics from another machine."""
        return self._keys["metrics"].hex()

    def audit_seed(self) -> bytes:
        """32 bytes from which the key that signs audit records is made."""
        return self._keys["audit"]

    def sign(self, data: bytes) -> str:
        """A signature over what a gateway keeps on disk."""
        return hmac.digest(self._keys["snapshot"], data, "sha256").hex()


def load_secret(home: Path, keyring: Keyring = IN_THE_CLEAR) -> Secret:
    """The secret of the installation at `home`, made at first use. Raises ConfigError, Unavailable."""
    path = home / "secret"
    try:
        private_folder(home)
        text = path.read_bytes() if path.exists() else create_private(path, keyring.seal(os.urandom(_BYTES), path.name))
    except OSError as error:
        raise ConfigError(f"{home} can't be used ({error.strerror}): choose a writable --home", param="home") from None
    value = keyring.open(text, path.name)
    if len(value) != _BYTES:
        raise ConfigError(f"{path} is damaged: restore it from a backup", param="home")
    return Secret(value)
