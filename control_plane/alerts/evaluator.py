"""The controller's own watch: looks at all metrics, fires the catalogue, tells receivers, keeps history.

One process does it at a time, by a lease on the job. What was fired and who knows of it is in the database, so that
another process, or this one after a restart, neither repeats nor forgets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from control_plane.alerts import receivers as telling
from control_plane.alerts import rollup
from control_plane.alerts.catalogue import CATALOGUE, Severity, series_needed
from control_plane.alerts.expressions import Context, reach
from control_plane.alerts.facts import Facts
from control_plane.alerts.scrape import Scraper
from control_plane.alerts.states import FIRING, KEEP_RESOLVED, Message, Receiver, advance, after_telling, due
from control_plane.alerts.window import Window, restrict
from control_plane.config import AlertSettings
from control_plane.domain import AlertState
from control_plane.errors import IngleError, LeaseLost, StoreUnavailable
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.store import alerts, endpoints, history
from control_plane.store.database import Store

JOB = "alerts"
_NAMES = series_needed() | rollup.READ
_SEVERITIES = {item.name: item.severity for item in CATALOGUE}
_MEMORY = 7 * 3600.0
_MOST_BLIND = 900.0
_BEHIND = 5
"""Points of a kind that are made up for after a pause."""
_LEASE_LOOKS = 3
_BACKOFF_MOST = 300.0


class Evaluator:
    """`owner` names this process in the lease."""

    def __init__(
        self,
        store: Store,
        scraper: Scraper,
        facts: Facts,
        settings: AlertSettings,
        *,
        owner: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._scraper = scraper
        self._facts = facts
        self._settings = settings
        self._owner = owner
        self._clock = clock
        self._receivers = {item.name: item for item in settings.receivers}
        self._known: Sequence[Receiver] = [
            Receiver(item.name, frozenset(Severity(name) for name in item.severities), item.resolved)
            for item in settings.receivers
        ]
        self._session = telling.Session()
        self._retry: dict[str, tuple[float, int]] = {}
        """By receiver that failed: when to try again, and how often it failed."""
        self._window: Window | None = None
        self._began = 0.0
        self._states: dict[str, AlertState] = {}

    async def run(self) -> None:
        """Until cancelled; then another may take over at once."""
        try:
            while True:
                try:
                    await self.tick()
                except StoreUnavailable as error:
                    event("alerts.store_unavailable", level=logging.WARNING, reason=error.message)
                except LeaseLost:
                    self._window = None
                except Exception as error:  # a fault of one look must not end the watch
                    event("alerts.fault", level=logging.ERROR, error=error)
                await asyncio.sleep(self._settings.interval)
        finally:
            await self._scraper.close()
            await self._session.close()
            with suppress(StoreUnavailable):
                async with self._store.write() as session:
                    await alerts.leave_job(session, JOB, self._owner)

    async def tick(self) -> None:
        """One look. Raises LeaseLost where another process watches, StoreUnavailable."""
        now = self._clock()
        async with self._store.write() as session:
            await alerts.take_job(session, JOB, self._owner, now, self._settings.interval * _LEASE_LOOKS + 5.0)
            if self._window is None:
                self._states = {state.fingerprint: state for state in await alerts.list_alerts(session)}
        if self._window is None:
            self._window, self._began = Window(keep=_MEMORY), now
        await self._facts.look(now)
        self._window.add(now, restrict(await self._scraper.look(), _NAMES))
        await self._evaluate(self._window, now)
        await self._keep_history(self._window, now)

    async def _evaluate(self, window: Window, now: float) -> None:
        scale = self._settings.scale
        context = Context(window, now, scale)
        # Vectors of a thousand series are worked out beside the loop that serves.
        found = await asyncio.to_thread(lambda: [(item, item.expression.value(context)) for item in CATALOGUE])
        blind = frozenset(
            item.name for item in CATALOGUE if now - self._began < min(reach(item.expression), _MOST_BLIND) * scale
        )
        outcome = advance(
            self._states,
            found,
            now,
            scale=scale,
            patience=2 * self._settings.interval,
            began=self._began,
            blind=blind,
        )
        await self._write(outcome.changed, outcome.gone, now)
        for state in outcome.changed:
            if state.state != (before.state if (before := self._states.get(state.fingerprint)) else ""):
                event("alert.state", alert=state.alert, state=state.state, labels=dict(state.labels),
                      summary=state.summary)  # fmt: skip
            self._states[state.fingerprint] = state
        for fingerprint in outcome.gone:
            self._states.pop(fingerprint, None)
        for item in CATALOGUE:
            count = sum(state.alert == item.name and state.state == FIRING for state in self._states.values())
            metrics.alerts_firing.labels(item.name, str(item.severity)).set(count)
        await self._tell(now)

    async def _tell(self, now: float) -> None:
        if not self._receivers:
            return
        async with self._store.read() as session:
            silences = [row.matchers for row in await alerts.list_silences(session, now)]
        batches: dict[tuple[str, bool], list[Message]] = {}
        for message in due(self._states.values(), _SEVERITIES, self._known, silences):
            batches.setdefault((message.receiver, message.over), []).append(message)
        await asyncio.gather(*(self._send(name, over, batch, now) for (name, over), batch in batches.items()))

    async def _send(self, name: str, over: bool, batch: list[Message], now: float) -> None:
        retry_at, failures = self._retry.get(name, (0.0, 0))
        if now < retry_at:
            return
        states = [message.state for message in batch[: telling.MOST_AT_ONCE]]
        try:
            await telling.tell(self._receivers[name], states, over=over, session=self._session)
        except IngleError as error:
            wait = min(_BACKOFF_MOST, self._settings.interval * 2.0 ** min(failures, 10))
            self._retry[name] = (now + wait, failures + 1)
            event("alerts.not_told", level=logging.ERROR, receiver=name, reason=error.message)
            return
        self._retry.pop(name, None)
        # told first, written then: whoever is killed in between tells it twice, and nobody is left out
        told = [
            after_telling(self._states[state.fingerprint], [name], over=over)
            for state in states
            if state.fingerprint in self._states
        ]
        for state in told:
            self._states[state.fingerprint] = state
        await self._write(told, [], now)

    async def _write(self, changed: Sequence[AlertState], gone: Sequence[str], now: float) -> None:
        if not changed and not gone:
            return
        async with self._store.write() as session:
            await alerts.take_job(session, JOB, self._owner, now, self._settings.interval * _LEASE_LOOKS + 5.0)
            await alerts.write_alerts(session, changed, gone)

    async def _keep_history(self, window: Window, now: float) -> None:
        for step in history.KEPT:
            async with self._store.read() as session:
                last = await history.last_point(session, step)
            newest = int(now // step) * step - step
            first = max(last + step, newest - (_BEHIND - 1) * step, int(self._began // step) * step)
            for at in range(first, newest + 1, step):
                found = await asyncio.to_thread(rollup.points, window, at, step)
                async with self._store.write() as session:
                    ids = {(item.region, item.name): item.id for item in await endpoints.list_endpoints(session)}
                    rows = {ids[place]: point for place, point in found.items() if place in ids}
                    await history.add_points(session, step, at, rows)
                    if step == min(history.KEPT):
                        await history.forget_points(session, now)
                        await alerts.forget_alerts(session, now - KEEP_RESOLVED)
