"""Usage: one event a request, journalled on disk first, then written to the store in batches.

The journal survives a crash of the gateway and a store that is away; the store ignores a request id that it has, so
that replaying the journal bills nothing twice.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import asdict
from pathlib import Path

import msgspec

from control_plane.domain import UsageEvent
from control_plane.errors import StoreUnavailable
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.security.files import private_folder
from control_plane.store import traffic
from control_plane.store.database import Poke, Store

_BATCH = 500
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(UsageEvent).decode


class Meter:
    """`max_bytes` bounds the journal; events beyond it are lost, counted and logged."""

    def __init__(self, store: Store, folder: Path, region: str, *, interval: float, max_bytes: int) -> None:
        self._store = store
        self._region = region
        self._interval = interval
        self._max_bytes = max_bytes
        self._path = private_folder(folder) / f"{region}.usage"
        self._pending: deque[UsageEvent] = deque(self._replay())
        self._journal = self._path.open("ab", buffering=0)
        self._size = self._journal.tell()
        self._full = Poke()

    def record(self, usage: UsageEvent) -> None:
        """Journal one finished request."""
        line = _encode(asdict(usage)) + b"\n"
        if self._size + len(line) > self._max_bytes:
            metrics.usage_dropped.labels(self._region).inc()
            event("usage.dropped", level=logging.ERROR, region=self._region, request=usage.request_id)
            return
        try:
            self._size += self._journal.write(line)
        except OSError as error:
            event("usage.not_journalled", level=logging.ERROR, region=self._region, reason=error.strerror)
        self._pending.append(usage)
        if len(self._pending) >= _BATCH:
            self._full.set()

    async def run(self) -> None:
        """Write to the store until cancelled."""
        while True:
            await self._full.wait(self._interval)
            try:
                await self.flush()
            except StoreUnavailable as error:
                event("usage.not_written", level=logging.WARNING, region=self._region, reason=error.message)

    async def flush(self) -> None:
        """Write what is pending. Raises StoreUnavailable, and then keeps it."""
        metrics.usage_pending.labels(self._region).set(len(self._pending))
        while self._pending:
            batch = [self._pending[index] for index in range(min(_BATCH, len(self._pending)))]
            async with self._store.write() as session:
                await traffic.add_usage(session, batch)
            for _ in batch:
                self._pending.popleft()
        if self._size:
            # Nothing runs between the last check and this: all that the journal holds is in the store.
            self._journal.truncate(0)
            self._size = 0
        metrics.usage_pending.labels(self._region).set(0)

    async def close(self) -> None:
        try:
            await self.flush()
        except StoreUnavailable as error:
            event("usage.kept_for_later", level=logging.WARNING, region=self._region, reason=error.message)
        self._journal.close()

    def _replay(self) -> list[UsageEvent]:
        if not self._path.exists():
            return []
        events = []
        for line in self._path.read_bytes().splitlines():
            try:
                events.append(_decode(line))
            except msgspec.DecodeError:  # the last line of a crash
                event("usage.line_skipped", level=logging.WARNING, region=self._region)
        return events
