"""Usage: one event a request, journalled on disk first, then written to the store in batches.

The journal survives a crash of the gateway and a store that is away; the store ignores a request id that it has, so
that replaying the journal bills nothing twice. A request is journalled when it goes to a replica, and again when it
ends: one whose gateway died in between is found in the journal, marked `gateway_lost`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from control_plane.domain import UsageEvent
from control_plane.errors import StoreUnavailable
from control_plane.gateway.exchange import Exchange
from control_plane.metering.prices import PriceBook
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.security.files import private_folder
from control_plane.store import usage as queries
from control_plane.store.database import Poke, Store

_BATCH = 500
_MOST_JOURNALS = 64
_COMPACT_BYTES = 1024 * 1024
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(UsageEvent).decode


def usage_event(exchange: Exchange, region: str, book: PriceBook, outcome: str) -> UsageEvent | None:
    """What is billed for a request that ends like this; None for one that never went to a replica."""
    route, key, target = exchange.route, exchange.key, exchange.target
    if route is None or key is None or target is None:
        return None
    tokens, estimated = exchange.tokens(outcome)
    cost = book.tokens_nano(route.model, tokens.prompt_tokens, tokens.cached_tokens, tokens.completion_tokens)
    return UsageEvent(
        request_id=exchange.request_id,
        tenant_id=route.tenant_id,
        key_id=key.id,
        endpoint_id=route.endpoint_id,
        endpoint_name=route.name,
        replica_id=target.id,
        region=region,
        route=exchange.path,
        started_at=exchange.started_at,
        duration_ms=round(exchange.elapsed() * 1000, 3),
        ttft_ms=None if exchange.first_byte is None else round(exchange.first_byte * 1000, 3),
        held_ms=round(exchange.held * 1000, 3),
        status=exchange.status,
        outcome=outcome,
        streamed=exchange.streamed,
        prompt_tokens=tokens.prompt_tokens,
        completion_tokens=tokens.completion_tokens,
        cached_tokens=tokens.cached_tokens,
        wasted_tokens=max(0, tokens.completion_tokens - exchange.delivered) if outcome == "cancelled" else 0,
        estimated=estimated,
        cost_nano=cost,
        price_version=book.version,
    )


class Meter:
    """`max_bytes` bounds the journal; events beyond it are lost, counted and logged.

    Each process has a journal of its own, `<region>-<n>.usage`, and takes over those of processes that are gone.
    """

    def __init__(self, store: Store, folder: Path, region: str, *, interval: float, max_bytes: int) -> None:
        self._store = store
        self._region = region
        self._interval = interval
        self._max_bytes = max_bytes
        self._open: dict[str, UsageEvent] = {}
        self._lines: list[bytes] = []
        """Not yet in the journal; they are by the loop's next round."""
        self._full = Poke()
        self._flushing = asyncio.Lock()
        self._used: dict[str, float] = {}
        self._journal, self._pending = self._take_over(private_folder(folder))
        self._size = self._journal.tell()

    def begin(self, usage: UsageEvent) -> None:
        """Journal what is known of a request that may not come to its end here.

        What is billed for a reply is on disk when this returns. That a request began is there by the loop's next round:
        nothing of its reply can have come by then.
        """
        self._open[usage.request_id] = usage
        self._write(usage, soon=usage.outcome == "gateway_lost")

    def record(self, usage: UsageEvent) -> None:
        """Journal one finished request."""
        known = self._open.pop(usage.request_id, None)
        self._used[usage.key_id] = usage.started_at
        if not self._write(usage, soon=known is not None and known.cost_nano == usage.cost_nano > 0):
            metrics.usage_dropped.labels(self._region).inc()
            event("usage.dropped", level=logging.ERROR, region=self._region, request=usage.request_id)
            return
        self._pending.append(usage)
        if len(self._pending) >= _BATCH:
            self._full.set()

    def _write(self, usage: UsageEvent, *, soon: bool) -> bool:
        line = _encode(usage) + b"\n"
        if self._size + len(line) > self._max_bytes:
            return False
        self._size += len(line)
        self._lines.append(line)
        if not soon:
            self._put()
        elif len(self._lines) == 1:
            asyncio.get_running_loop().call_soon(self._put)
        return True

    def _put(self) -> None:
        """One write for all that came together: a busy gateway spent a tenth of its time in these."""
        lines, self._lines = self._lines, []
        if not lines or self._journal.closed:
            return
        try:
            self._journal.write(b"".join(lines))
        except OSError as error:
            event("usage.not_journalled", level=logging.ERROR, region=self._region, reason=error.strerror)

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
        async with self._flushing:  # the last one, at the end, may come while another is under way
            await self._flush()

    async def _flush(self) -> None:
        self._put()
        metrics.usage_pending.labels(self._region).set(len(self._pending))
        while self._pending:
            batch = [self._pending[index] for index in range(min(_BATCH, len(self._pending)))]
            used, self._used = self._used, {}
            try:
                async with self._store.write() as session:
                    await queries.add_usage(session, batch)
                    await queries.note_key_use(session, used)
            except StoreUnavailable:
                self._used = used | self._used
                raise
            for _ in batch:
                self._pending.popleft()
        # Nothing runs between the last check and this: all that the journal holds is in the store, or open.
        if self._size > (_COMPACT_BYTES if self._open else 0):
            self._rewrite(self._open.values())
        metrics.usage_pending.labels(self._region).set(0)

    def _rewrite(self, events: Iterable[UsageEvent]) -> None:
        self._lines.clear()  # what is still wanted of them is among `events`
        kept = b"".join(_encode(usage) + b"\n" for usage in events)
        self._journal.truncate(0)
        self._size = self._journal.write(kept) or 0 if kept else 0

    async def close(self) -> None:
        try:
            await self.flush()
        except StoreUnavailable as error:
            event("usage.kept_for_later", level=logging.WARNING, region=self._region, reason=error.message)
        self._journal.close()

    def _take_over(self, folder: Path) -> tuple[BinaryIO, deque[UsageEvent]]:
        """The first journal that nobody has, and the events of all that nobody has."""
        own: BinaryIO | None = None
        own_path = folder / f"{self._region}-0.usage"
        events: dict[str, UsageEvent] = {}
        for number in range(_MOST_JOURNALS):
            path = folder / f"{self._region}-{number}.usage"
            if own is not None and not path.exists():
                continue
            file = path.open("ab", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                continue
            found = self._read(path)
            events |= found
            if own is None:
                own, own_path = file, path
                continue
            for usage in found.values():
                own.write(_encode(usage) + b"\n")
            os.unlink(path)
            file.close()
        if own is None:
            raise OSError(f"{_MOST_JOURNALS} gateways of {self._region} use {own_path.parent} already")
        return own, deque(events.values())

    def _read(self, path: Path) -> dict[str, UsageEvent]:
        """By request id: the last line of a request is what counts."""
        events = {}
        for line in path.read_bytes().splitlines():
            try:
                usage = _decode(line)
            except msgspec.DecodeError:  # the last line of a crash
                event("usage.line_skipped", level=logging.WARNING, region=self._region)
                continue
            events[usage.request_id] = usage
        return events
