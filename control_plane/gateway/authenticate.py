"""Who asks: the key in the Authorization header, looked up in the snapshot, and where they ask from."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Sequence
from functools import lru_cache

from control_plane.errors import Forbidden, StoreUnavailable, Unauthenticated
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

    async def check(self, authorization: str | None, source: str | None) -> Key:
        """The key, used from the address `source`. Raises Unauthenticated, Forbidden, StoreUnavailable."""
        now = self._clock()
        keeper = self._keeper
        if now - keeper.checked_at > self._max_age:
            raise StoreUnavailable("the gateway has lost touch with its control plane; try again soon", retry_after=5)
        scheme, _, text = (authorization or "").partition(" ")
        parsed = parse_key(text.strip()) if scheme.lower() == "bearer" else None
        key = self._find(parsed, now)
        if key is None:
            if not await keeper.look_again():
                raise StoreUnavailable("the key can't be checked at the moment; try again soon", retry_after=2)
            key = self._find(parsed, now)
        if key is None:
            raise Unauthenticated(_MESSAGE)
        if key.scope.networks is not None and not within(source, key.scope.networks):
            raise Forbidden("this key may not be used from this address")
        return key

    def require_still(self, key: Key) -> None:
        """For a request that waited: its key may have ended meanwhile. Raises Unauthenticated."""
        now = self._keeper.current.keys.get(key.id)
        if now is None or now.hash != key.hash or (now.expires_at is not None and now.expires_at <= self._clock()):
            raise Unauthenticated(_MESSAGE)

    def _find(self, parsed: tuple[str, str] | None, now: float) -> Key | None:
        key_id, secret = parsed or ("", "")
        key = self._keeper.current.keys.get(key_id)
        digest = self._secret.key_hash(secret).hex()
        if not hmac.compare_digest(digest, key.hash if key else _NO_HASH) or key is None:
            return None
        return None if key.expires_at is not None and key.expires_at <= now else key


def within(source: str | None, networks: Sequence[str]) -> bool:
    """Whether the address `source` is in one of `networks`. An IPv4 address mapped into IPv6 counts as itself."""
    try:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(source or "")
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in _network(text) for text in networks)


def source_address(peer: str | None, forwarded: Sequence[str], trusted: Sequence[str]) -> str | None:
    """Where a request came from: `peer`, or what trusted proxies say of it in X-Forwarded-For, read from the end.

    `forwarded` are all headers of that name: a client may have sent one of its own before a proxy's.
    """
    hops = [hop.strip() for hop in ",".join(forwarded).split(",") if hop.strip()]
    while hops and trusted and within(peer, trusted):
        peer = hops.pop()
    return peer


@lru_cache(4096)
def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text)
