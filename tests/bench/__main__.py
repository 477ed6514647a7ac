"""`make bench`: the engine beside the peers that are installed, same machine, same run, same prompts.

Tokens are counted at the client. Each figure is the median of --runs. Servers take turns: in each run one after the
other is started, measured and ended, so that what else the machine does falls on all alike. They are not up together:
an idle vLLM still takes enough of a core to slow those beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from control_plane.bench.driver import Driver, Outcome, Target
from control_plane.bench.report import percentile
from control_plane.bench.workload import Lengths, Workload
from data_plane.loading.sources import resolve
from data_plane.text.load import load_text
from tests.bench.export import export
from tests.bench.peers import ENVIRONMENTS, MIXED, MODEL, Server, ingle, llama_cpp, resident_mb, running, vllm

# every server must write all the tokens it is asked for: the end token is made impossible
EXTRA = {"logit_bias": {"2": -100}}


@dataclass(frozen=True)
class Figure:
    """One measured quantity; `better` says which way is up."""

    name: str
    unit: str
    better: str
    measure: Callable[[Driver, int], Coroutine[Any, Any, float]]

    @property
    def title(self) -> str:
        return f"{self.name} ({self.unit})"


def streams(concurrency: int) -> Callable[[Driver, int], Coroutine[Any, Any, float]]:
    async def measure(driver: Driver, seed: int) -> float:
        workload = Workload(Lengths(128, 128), Lengths(128, 128), seed=seed)
        return rate(await driver.closed(workload.requests(), concurrency, concurrency))

    return measure


def decode_at(context: int) -> Callable[[Driver, int], Coroutine[Any, Any, float]]:
    async def measure(driver: Driver, seed: int) -> float:
        workload = Workload(Lengths(context, context), Lengths(64, 64), seed=seed)
        (outcome,) = await driver.closed(workload.requests(), 1, 1)
        return 1 / check(outcome).tpot

    return measure


async def prefill(driver: Driver, seed: int) -> float:
    workload = Workload(Lengths(1024, 1024), Lengths(1, 1), seed=seed)
    # counted here: not every server says how many there were
    tokens = len(load_text(resolve(MODEL))[0].encode(next(workload.requests()).prompt))
    (outcome,) = await driver.closed(workload.requests(), 1, 1)
    return tokens / check(outcome).ttft


async def mixed(driver: Driver, seed: int) -> float:
    """TTFT p95 of short requests in 8 streams while a prompt of 2,048 tokens arrives every second for 10 seconds."""
    steady = Workload(Lengths(64, 64), Lengths(64, 64), seed=seed)
    long = Workload(Lengths(2048, 2048), Lengths(8, 8), seed=seed + 50_000)
    until = time.monotonic() + 10

    async def stream(number: int) -> list[Outcome]:
        own = replace(steady, seed=seed + 1000 * (number + 1)).requests()
        outcomes = []
        while time.monotonic() < until:
            outcomes.append(await driver.send(next(own)))
        return outcomes

    sides = [asyncio.create_task(stream(number)) for number in range(8)]
    await driver.open(long.requests(float(second) for second in range(10)))
    outcomes = [check(outcome) for side in sides for outcome in await side]
    return percentile(sorted(outcome.ttft for outcome in outcomes), 0.95) * 1000


def check(outcome: Outcome) -> Outcome:
    if outcome.error:
        raise RuntimeError(f"a request failed: {outcome.error}")
    return outcome


def rate(outcomes: list[Outcome]) -> float:
    total = sum(check(outcome).output_tokens for outcome in outcomes)
    return total / (max(o.ended for o in outcomes) - min(o.sent for o in outcomes))


FIGURES = {
    "one": Figure("one stream", "tokens/s", "more", streams(1)),
    "eight": Figure("8 streams", "tokens/s", "more", streams(8)),
    "many": Figure("32 streams", "tokens/s", "more", streams(32)),
    "more": Figure("64 streams", "tokens/s", "more", streams(64)),
    "prefill": Figure("prefill of 1,024 tokens", "tokens/s", "more", prefill),
    "mixed": Figure(MIXED, "ms", "less", mixed),
    "short": Figure("decode at 128 tokens of context", "tokens/s", "more", decode_at(128)),
    "long": Figure("decode at 4,096 tokens of context", "tokens/s", "more", decode_at(4096)),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench ARGS=…", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="", help=f"figures, of {', '.join(FIGURES)}")
    parser.add_argument("--servers", default="", help="names, such as ingle,vLLM")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = [FIGURES[name] for name in options.only.split(",") if name] or list(FIGURES.values())
    gguf = resolve(MODEL)
    folder = export(gguf, ENVIRONMENTS / "model")
    known = [ingle(), llama_cpp(gguf), vllm(folder)]
    chosen = options.servers.split(",") if options.servers else []
    servers = [server for server in known if server is not None and (not chosen or server.name in chosen)]
    values: dict[str, dict[str, list[float]]] = {server.name: {} for server in servers}
    for run in range(options.runs):
        for server in servers:
            settle()
            for what, found in measure(server, wanted, run).items():
                values[server.name].setdefault(what, []).append(found)
                print(f"  run {run + 1}, {server.name}, {what}: {found:.4g}", file=sys.stderr)
    print_table(values, servers, options.runs)
    if options.json:
        options.json.write_text(json.dumps(values, indent=1))
    return 0


def settle() -> None:
    """Wait until the machine idles, 20 seconds at most: some servers spin for a while after their last request."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        before = _cpu_seconds()
        time.sleep(0.5)
        if _cpu_seconds() - before < 0.05:
            return


def _cpu_seconds() -> float:
    """What all cores have worked since the machine started."""
    user, nice, system = (int(word) for word in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def measure(server: Server, figures: list[Figure], run: int) -> dict[str, float]:
    """One start of the server, and each figure once."""
    with running(server) as started:
        target = Target(started.url, MODEL, extra=EXTRA)
        found = {"start to first token (s)": started.seconds + asyncio.run(first_token(target))}
        asyncio.run(one(target, FIGURES["one"], 1000 + run))  # what is slow once only
        for figure in figures:
            if figure.name not in server.spared:
                found[figure.title] = asyncio.run(one(target, figure, run))
        return found | {"resident memory (MB)": resident_mb(started.pid)}


async def first_token(target: Target) -> float:
    async with Driver(target, 4) as driver:
        workload = Workload(Lengths(8, 8), Lengths(1, 1), seed=7)
        (outcome,) = await driver.closed(workload.requests(), 1, 1)
        return check(outcome).ttft


async def one(target: Target, figure: Figure, seed: int) -> float:
    async with Driver(target, 256) as driver:
        return await figure.measure(driver, 7919 * (seed + 1))


def print_table(values: dict[str, dict[str, list[float]]], servers: list[Server], runs: int) -> None:
    names = list(values)
    print(f"\n{datetime.now(UTC):%Y-%m-%d}, {_processor()}, Python {platform.python_version()}, medians of {runs}")
    print(", ".join(f"{server.name} {server.version}" for server in servers))
    print("\n| | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    results = {name: {what: statistics.median(found) for what, found in each.items()} for name, each in values.items()}
    for quantity in results[names[0]]:
        ours = results[names[0]][quantity]
        cells = []
        for name in names:
            value = results[name].get(quantity)
            ratio = f" ({ours / value:.2f}×)" if name != names[0] and value else ""
            cells.append("" if value is None else f"{value:.4g}{ratio}")
        print(f"| {quantity} | " + " | ".join(cells) + " |")
    print(f"\n(n×): {names[0]}'s figure over that server's")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} × {line.split(':')[1].strip()}"
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
