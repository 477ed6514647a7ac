"""`python -m tests.contract.disturbance`: the gaps between the tokens of 20 live streams, quiet and under attack.

The attack is every hostile request of the suite while the streams run, from a process of its own. Rounds
alternate, so that what else the machine does meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import aiohttp
import numpy as np

from data_plane.loading.sources import pull
from tests.contract.conftest import MODEL
from tests.contract.conftest import Replica as Served
from tests.contract.test_hostile import HOSTILE, STREAMS, abandon, send
from tests.data_plane.replica import running

TOKENS = 400


async def gaps(url: str) -> list[float]:
    """Milliseconds between the chunks of each of STREAMS streams, after their first."""
    found: list[float] = []

    async def read(client: aiohttp.ClientSession, number: int) -> None:
        body = {
            "model": "m", "prompt": f"Story number {number}: Once upon a time", "max_tokens": TOKENS, "temperature": 0,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
        last = 0.0
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if last:
                    found.append((now - last) * 1000)
                last = now

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await asyncio.gather(*(read(client, number) for number in range(STREAMS)))
    return found


def attack(url: str, begun: Event, stop: Event, sent: multiprocessing.Queue[int], pause_s: float) -> None:
    os.nice(19)  # an attacker's own work is not done on the machine that it attacks
    begun.set()
    served = Served(url, 0, None)  # type: ignore[arg-type]  # nobody waits for its process here
    count = 0
    while not stop.is_set():
        for path, body in HOSTILE:
            if stop.wait(pause_s):
                break
            send(served, path, body)
            count += 1
        abandon(served)
    sent.put(count)


def attacked(url: str, pause_s: float) -> tuple[list[float], int]:
    """The gaps, and how many hostile requests were answered meanwhile."""
    context = multiprocessing.get_context("spawn")
    begun, stop, sent = context.Event(), context.Event(), context.Queue()
    attacker = context.Process(target=attack, args=(url, begun, stop, sent, pause_s))
    attacker.start()
    begun.wait(60)  # its imports are nobody's attack
    try:
        found = asyncio.run(gaps(url))
    finally:
        stop.set()
    count = sent.get(timeout=60)
    attacker.join(60)
    return found, count


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--pause",
        type=float,
        default=0.08,
        help="seconds between hostile requests; by default a round has them all about once",
    )
    arguments = parser.parse_args()
    quiet: list[float] = []
    loud: list[float] = []
    hostile = 0
    with tempfile.TemporaryDirectory() as folder, running(pull(MODEL), Path(folder) / "log", "--name", "m") as replica:
        url = str(replica.client.base_url).rstrip("/")
        asyncio.run(gaps(url))
        time.sleep(2)  # the first idle moment is when a replica loads what grammars need
        for _ in range(arguments.rounds):
            quiet += asyncio.run(gaps(url))
            found, count = attacked(url, arguments.pause)
            loud += found
            hostile += count
    print(f"hostile requests: {hostile}")
    for name, found in (("quiet", quiet), ("attacked", loud)):
        p50, p95, p99 = np.percentile(found, (50, 95, 99))
        print(f"{name}: gaps={len(found)} p50_ms={p50:.1f} p95_ms={p95:.1f} p99_ms={p99:.1f} worst_ms={max(found):.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
