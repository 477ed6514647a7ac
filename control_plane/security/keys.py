"""API keys `ingle_<id>_<secret>` and admin tokens `ingleadm_<secret>`."""

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass

from control_plane.security.secret import Secret

_KEY = re.compile(r"ingle_([a-z2-7]{16})_([A-Za-z0-9_-]{43})", re.ASCII)


@dataclass(frozen=True)
class NewKey:
    """A key just made: `text` is shown once, `digest` is stored."""

    id: str
    text: str
    digest: bytes

    @property
    def prefix(self) -> str:
        """What may be shown of the key afterwards."""
        return f"ingle_{self.id}_…{self.text[-4:]}"


def make_key(secret: Secret) -> NewKey:
    key_id = base64.b32encode(os.urandom(10)).decode().lower()
    part = _random_text()
    return NewKey(key_id, f"ingle_{key_id}_{part}", secret.key_hash(part))


def parse_key(text: str) -> tuple[str, str] | None:
    """The id and the secret part, or None where `text` is no key of ours."""
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


def make_admin_token(secret: Secret) -> tuple[str, bytes]:
    """A token and what is stored of it."""
    token = f"ingleadm_{_random_text()}"
    return token, secret.admin_hash(token)


def _random_text() -> str:
    return base64.urlsafe_b64encode(os.urandom(32)).decode().rstrip("=")
