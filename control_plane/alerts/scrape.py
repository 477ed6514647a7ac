"""Reads the metrics of an installation: of this process, of gateways elsewhere, and of every replica."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import aiohttp
from prometheus_client import REGISTRY, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.alerts.expressions import Labels, labels_of
from control_plane.domain import ReplicaState
from control_plane.security.mesh import PLAIN, Link
from control_plane.security.secret import Secret
from control_plane.store import replicas, traffic
from control_plane.store.database import Store

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_AT_ONCE = 16
_MOST_BYTES = 4 * 1024 * 1024
_HEARD_WITHIN = 20.0
_ANSWERING = frozenset({ReplicaState.READY, ReplicaState.UNHEALTHY, ReplicaState.DRAINING})
Families = list[Metric]


class Scraper:
    """`own` are the URLs of the gateways of this process, by region: their metrics are at hand.

    `replicas_text` is what Prometheus is given of all replicas in one answer.
    """

    def __init__(
        self,
        store: Store,
        secret: Secret,
        *,
        link: Link = PLAIN,
        trust: ssl.SSLContext | None = None,
        own: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._secret = secret
        self._link = link
        self._trust = trust
        self._own = {} if own is None else own
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._reading: asyncio.Task[bytes] | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def look(self) -> list[tuple[str, Labels, float]]:
        """All samples that can be had now; who does not answer is missing. Raises StoreUnavailable."""
        there = await asyncio.gather(self._replicas(), self._gateways())
        families = [*REGISTRY.collect(), *(family for part in there for family in part)]
        return [
            (sample.name, labels_of(sample.labels), float(sample.value))
            for family in families
            for sample in family.samples
        ]

    async def replicas_text(self) -> bytes:
        """Every replica's metrics as Prometheus text. Those who ask at once get one answer."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._text())
        return await asyncio.shield(self._reading)

    async def _text(self) -> bytes:
        merged: dict[str, Metric] = {}
        for family in await self._replicas():
            known = merged.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples
        return generate_latest(_Collected(merged.values()))

    async def _replicas(self) -> Families:
        async with self._store.read() as session:
            known = await replicas.live_replicas(session)
        return await self._all(
            (
                self._link.url(replica.address, "/metrics"),
                {
                    "headers": {"Authorization": f"Bearer {self._secret.replica_token(replica.id)}"},
                    **self._link.options(replica.id),
                },
            )
            for replica in known
            if replica.address is not None and replica.state in _ANSWERING
        )

    async def _gateways(self) -> Families:
        async with self._store.read() as session:
            known = await traffic.live_gateways(session, self._clock() - _HEARD_WITHIN)
        options: dict[str, Any] = {"headers": {"Authorization": f"Bearer {self._secret.metrics_token()}"}}
        if self._trust is not None:
            options["ssl"] = self._trust
        return await self._all((f"{url}/metrics", options) for url in known if url and not self._ours(url))

    def _ours(self, url: str) -> bool:
        return url in self._own.values()

    async def _all(self, wanted: Iterable[tuple[str, Mapping[str, Any]]]) -> Families:
        parts = await asyncio.gather(*(self._get(url, options) for url, options in wanted))
        return [family for part in parts for family in part]

    async def _get(self, url: str, options: Mapping[str, Any]) -> Families:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT, connector=aiohttp.TCPConnector(limit=64))
        async with self._slots:
            try:
                async with self._session.get(url, **options) as response:
                    if response.status != 200:
                        return []
                    body = await response.content.read(_MOST_BYTES)
                return list(text_string_to_metric_families(body.decode()))
            except (aiohttp.ClientError, TimeoutError, ValueError):
                return []


class _Collected:
    def __init__(self, families: Collection[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
