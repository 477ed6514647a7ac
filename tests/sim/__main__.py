"""`make sim SEEDS=500`: runs seeds; each that breaks an invariant is printed with the command that replays it."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.sim.crash import points, run_point
from tests.sim.exits import run_exits
from tests.sim.report import Broken, Report
from tests.sim.run import migrated, run_seed

_TOLD = 100
"""Seeds after which a line says how far it is."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--crashes", type=int, metavar="N", help="instead of seeds: fail at every Nth point of a controller's work"
    )
    parser.add_argument(
        "--exits", type=int, metavar="N", help="instead of seeds: N controllers that exit, each at another point"
    )
    options = parser.parse_args()
    if options.crashes:
        return _crashes(options.crashes)
    if options.exits:
        return _exits(options.exits)
    seeds = range(options.first, options.first + options.seeds)
    started, held, total = time.monotonic(), 0, Report(0)
    for number, report in enumerate(_reports(seeds, options.jobs), 1):
        if isinstance(report, str):
            print(f"FAILED {report}", file=sys.stderr, flush=True)
        else:
            held += 1
            for name in ("requests", "answered", "refused", "machines", "kills", "orphans"):
                setattr(total, name, getattr(total, name) + getattr(report, name))
        if number % _TOLD == 0 or number == len(seeds):
            print(
                f"{held} of {number} seeds held in {time.monotonic() - started:.0f} s: {total.requests} requests, "
                f"{total.answered} answered, {total.machines} machines, {total.orphans} of them swept as orphans, "
                f"{total.kills} controllers killed",
                flush=True,
            )
    return int(held < len(seeds))


def _crashes(stride: int) -> int:
    logging.disable(logging.CRITICAL)
    started, runs, killed, orphans = time.monotonic(), 0, 0, 0
    for point, warmth in points(stride):
        try:
            report = run_point(point, warmth)
        except Exception as error:
            print(f"FAILED {error}", file=sys.stderr)
            return 1
        runs, killed, orphans = runs + 1, killed + report.kills, orphans + report.orphans
    print(
        f"{runs} failures held in {time.monotonic() - started:.0f} s: {killed} controllers killed, {orphans} machines "
        "swept as orphans"
    )
    return 0


def _exits(count: int) -> int:
    logging.disable(logging.CRITICAL)
    started, exits, longest = time.monotonic(), 0, 0.0
    try:
        for number, run in enumerate(run_exits(count), 1):
            exits, longest = exits + run.exits, max(longest, run.longest)
            if number % _TOLD == 0 or number == count:
                print(
                    f"{number} of {count} lives held in {time.monotonic() - started:.0f} s: {exits} controllers "
                    f"exited; cloud, database and what was asked agreed again within {longest:.2f} s",
                    flush=True,
                )
    except Broken as error:
        print(f"FAILED {error}", file=sys.stderr)
        return 1
    return 0


def _reports(seeds: range, jobs: int) -> Iterator[Report | str]:
    if jobs == 1:
        yield from map(_one, seeds)
    else:
        migrated()  # before they are forked, so that each needn't, and leaves none behind
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            yield from pool.map(_one, seeds, chunksize=4)


def _one(seed: int) -> Report | str:
    logging.disable(logging.CRITICAL)
    try:
        return run_seed(seed)
    except Exception as error:
        return f"{error}\n  replay: python -m tests.sim --first {seed} --seeds 1"


if __name__ == "__main__":
    sys.exit(main())
