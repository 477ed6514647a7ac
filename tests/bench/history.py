"""How long a week of history takes: the query alone, and over the admin API. `python -m tests.bench.history`."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import httpx

from control_plane.client import trust
from control_plane.domain import HistoryPoint
from control_plane.profile import read_profile
from control_plane.store import history
from control_plane.store.database import Store
from tests.control_plane.harness import installed

ENDPOINTS, HOUR, WEEK = 50, 3600, 7 * 86_400


async def fill(url: str, ids: list[str], now: int) -> float:
    """Six weeks of hours and a day of minutes for each of `ids`; seconds that one query of a week takes."""
    store = Store(url)
    for step, seconds in history.KEPT.items():
        for start in range(now - seconds, now, 100 * step):
            async with store.write() as session:
                for at in range(start // step * step, min(start + 100 * step, now), step):
                    point = HistoryPoint(at, 0.1, 0.3, 0.01, 500.0, 3.0, 8.0, 0.0, 0.4, 0.5, 1.0, 0.01)
                    await history.add_points(session, step, at, dict.fromkeys(ids, point))
    started = time.perf_counter()
    async with store.read() as session:
        points = await history.list_points(session, ids[0], HOUR, now - WEEK, now)
    took = time.perf_counter() - started
    assert len(points) >= WEEK // HOUR - 1
    await store.close()
    return took


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, installed(Path(folder) / "home") as platform:
        program = platform.up()
        with platform.admin() as client:
            endpoint = client.create_endpoint({"name": "week", "region": "local-eu", "model": "fast"})
            now = int(time.time())
            url = f"sqlite+aiosqlite:///{platform.home / 'ingle.db'}"
            ids = [endpoint.id, *(f"ep_{index}" for index in range(ENDPOINTS - 1))]
            query = asyncio.run(fill(url, ids, now))
        token = read_profile(platform.home / "profile.toml").token
        with httpx.Client(verify=trust(platform.ca_file), headers={"Authorization": f"Bearer {token}"}) as http:
            for name, since, step in (
                ("a week by the hour", now - WEEK, HOUR),
                ("a day by the minute", now - 86_400, 60),
            ):
                path = f"{program.facts['admin']}/admin/v1/endpoints/week/history?from={since}&to={now}&step={step}"
                times = []
                for _ in range(5):
                    started = time.perf_counter()
                    reply = http.get(path)
                    times.append(time.perf_counter() - started)
                reply.raise_for_status()
                points, size = len(reply.json()["data"]), len(reply.content) / 1024
                print(f"{name}: {points} points, {size:.0f} KiB, {sorted(times)[2] * 1000:.1f} ms over the API")
        print(f"the query alone: {query * 1000:.1f} ms, beside {ENDPOINTS - 1} other endpoints' history")


if __name__ == "__main__":
    main()
