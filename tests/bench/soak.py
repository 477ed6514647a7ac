"""`python -m tests.bench.soak --minutes 60`: the same mild load for an hour. Does anything slow down or grow?

Processor time a token says it where other work on the machine moves the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

from control_plane.bench.driver import Driver, Outcome, Target
from control_plane.bench.workload import Lengths, Workload, poisson
from tests.bench.peers import MODEL, cpu_seconds, ingle, resident_mb, running


async def minute(url: str, number: int, rate: float, seconds: float) -> list[Outcome]:
    workload = Workload(Lengths.parse("16-256", "--isl"), Lengths.parse("16-64", "--osl"), seed=number)
    async with Driver(Target(url, MODEL), 256) as driver:
        return await driver.open(workload.requests(poisson(rate, seconds, number)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    options = parser.parse_args()
    print(
        "| minute | requests | errors | TTFT p50, ms | TPOT p50, ms | CPU a token, ms | memory, MB |\n"
        "|---|---|---|---|---|---|---|"
    )
    with running(ingle()) as server:
        for number in range(options.minutes):
            started, used = time.monotonic(), cpu_seconds(server.pid)
            outcomes = asyncio.run(minute(server.url, number, options.rate, 58.0))
            good = [outcome for outcome in outcomes if not outcome.error]
            ttft, tpot = (
                statistics.median(getattr(outcome, name) for outcome in good) * 1000 for name in ("ttft", "tpot")
            )
            tokens = sum(outcome.input_tokens + outcome.output_tokens for outcome in good)
            print(
                f"| {number} | {len(outcomes)} | {len(outcomes) - len(good)} | {ttft:.1f} | {tpot:.2f} "
                f"| {(cpu_seconds(server.pid) - used) * 1000 / tokens:.3f} | {resident_mb(server.pid):.0f} |",
                flush=True,
            )
            time.sleep(max(0.0, 60 - (time.monotonic() - started)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
