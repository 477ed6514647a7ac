"""The leases that one controller holds on endpoints: taken, extended while half over, and let go of at its end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Set
from contextlib import suppress

from control_plane.errors import StoreUnavailable
from control_plane.store import leases
from control_plane.store.database import Store
from control_plane.store.leases import Lease


class Holding:
    """`owner` names this process, `seconds` is how long a lease lasts, and `clock` tells seconds since the epoch."""

    def __init__(self, store: Store, owner: str, seconds: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._owner = owner
        self._seconds = seconds
        self._clock = clock
        self._leases: dict[str, Lease] = {}

    def held(self, endpoint_id: str) -> Lease | None:
        """The lease on an endpoint, if it is ours for a while yet."""
        held = self._leases.get(endpoint_id)
        return held if held is not None and held.expires_at - self._clock() > self._seconds / 4 else None

    async def take(self, endpoint_id: str) -> Lease | None:
        """None while another controller holds it. Raises StoreUnavailable."""
        async with self._store.write() as session:
            lease = await leases.take_lease(session, endpoint_id, self._owner, self._clock(), self._seconds)
        if lease is None:
            self.lose(endpoint_id)
        else:
            self._leases[endpoint_id] = lease
        return lease

    def lose(self, endpoint_id: str) -> None:
        """It was found to be another's."""
        self._leases.pop(endpoint_id, None)

    async def renew(self, sought: Set[str], busy: Set[str]) -> set[str]:
        """Extend the leases that are half over, and take those of `sought` that others held, in one transaction, so
        that what is read next is read under them. Those that are `busy` stay as they are.

        Returns those that others hold. Raises StoreUnavailable.
        """
        now = self._clock()
        due = {
            endpoint_id
            for endpoint_id, lease in self._leases.items()
            if not self._seconds / 2 < lease.expires_at - now <= self._seconds
        }
        due = (due | sought - self._leases.keys()) - busy
        if not due:
            return due
        async with self._store.write() as session:
            renewed = await leases.take_leases(session, sorted(due), self._owner, now, self._seconds)
        for endpoint_id in due:
            self.lose(endpoint_id)
        self._leases |= renewed
        return due - renewed.keys()

    async def inherit(self) -> None:
        """Free the leases of controllers of this machine that died: SQLite's are all of this machine."""
        if not self._store.sqlite:
            return
        with suppress(StoreUnavailable):
            async with self._store.write() as session:
                for owner in await leases.owners(session):
                    if not _lives(owner):
                        await leases.release_leases(session, owner)

    async def release(self) -> None:
        """Let go of all of them."""
        with suppress(StoreUnavailable):  # they expire
            async with self._store.write() as session:
                await leases.release_leases(session, self._owner)


def owner_name() -> str:
    """A name for this process in leases: host, pid and a random part."""
    return f"{socket.gethostname()[:32]}:{os.getpid()}:{os.urandom(4).hex()}"


def _lives(owner: str) -> bool:
    """Whether the process that `owner_name` named may still be there."""
    pid = owner.split(":")[-2]
    return pid.isdigit() and os.path.exists(f"/proc/{pid}")
