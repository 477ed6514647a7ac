"""Who asks: the key in the Authorization header, looked up in the snapshot."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from control_plane.errors import StoreUnavailable, Unauthenticated
from control_plane.gateway.snapshot import Key, SnapshotKeeper
from control_plane.security.keys import parse_key
from control_plane.security.secret import Secret

_NO_HASH = "0" * 64
_MESSAGE = "Incorrect API key provided. Send a valid one as `Authorization: Bearer ingle_…`."


class Authenticator:
    """Every way of not having a valid key ends in the same 401, after the same work.

    A key may be newer than the snapshot, so that the store is asked before a refusal. While the store is away nobody
    is told that their key is wrong: that is a 503.
    """

    def __init__(self, keeper: SnapshotKeeper, secret: Secret, *, clock: Callable[[], float], max_age: float) -> None:
        self._keeper = keeper
        self._secret = secret
        self._clock = clock
        self._max_age = max_age

    async def check(self, authorization: str | None) -> Key:
        """Raises Unauthenticated, StoreUnavailable."""
        now = self._clock()
        keeper = self._keeper
        if now - keeper.checked_at > self._max_age:
            raise StoreUnavailable("the gateway has lost touch with its control plane; try again soon", retry_after=5)
        scheme, _, text = (authorization or "").partition(" ")
        parsed = parse_key(text.strip()) if scheme.lower() == "bearer" else None
        key = self._find(parsed, now)
        if key is not None:
            return key
        await keeper.look_again()
        if not keeper.healthy:
            raise StoreUnavailable("the key can't be checked at the moment; try again soon", retry_after=2)
        key = self._find(parsed, now)
        if key is None:
            raise Unauthenticated(_MESSAGE)
        return key

    def _find(self, parsed: tuple[str, str] | None, now: float) -> Key | None:
        key_id, secret = parsed or ("", "")
        key = self._keeper.current.keys.get(key_id)
        digest = self._secret.key_hash(secret).hex()
        if not hmac.compare_digest(digest, key.hash if key else _NO_HASH) or key is None:
            return None
        return None if key.expires_at is not None and key.expires_at <= now else key
