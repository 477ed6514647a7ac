"""`make canaries`: does anything of one request reach another? Rounds of 64 at once, in a pool too small for them.

Each canary was asked alone first. Among others, who share its beginning, push it out, are cut off or leave, its tokens
and their log-probabilities must be the same to the last bit: a block, a row or a state of another's would change them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from data_plane.loading.sources import pull
from tests.data_plane import tiny
from tests.data_plane.replica import Replica, eventually, running
from tests.data_plane.text.tokenizers_made import byte_level_fields

AT_ONCE = 64
KINDS = 192
LEAVERS = 12
# a small part of what 64 canaries need
FLAGS = ("--name", "m", "--max-num-seqs", "48", "--kv-cache-tokens", "768", "--max-model-len", "512")
PREFIXES = [
    "",
    "You are the keeper of secrets of the house of birds. ",
    "You are the keeper of secrets of the house of birds, and you never tell one to another visitor. " * 2,
    "The quick brown fox jumps over the lazy dog, while the rain in Spain falls mainly on the plain. ",
]
TENANTS = ["", "tenant-a", "tenant-b"]
Told = list[tuple[str, float]]


@dataclass(frozen=True)
class Canary:
    body: dict[str, Any]
    tenant: str


@dataclass
class Found:
    """leaks: what a canary said alone, and among others."""

    asked: int = 0
    leaks: list[tuple[Canary, Told, Told]] = field(default_factory=list)
    preemptions: float = 0
    cancelled: float = 0


def made(draw: random.Random, number: int) -> Canary:
    secret = "".join(draw.choice("bcdfghklmnprstvz") + draw.choice("aeiou") for _ in range(6))
    body = {
        "model": "m", "prompt": f"{draw.choice(PREFIXES)}The secret of bird {number} is {secret}. It is {secret}, and",
        "max_tokens": draw.randrange(16, 96), "temperature": draw.choice((0, 1)), "seed": number, "logprobs": 1,
        "ignore_eos": True,
    }  # fmt: skip
    return Canary(body, draw.choice(TENANTS))


async def ask(client: aiohttp.ClientSession, canary: Canary) -> Told:
    async with client.post(
        "/v1/completions", json=canary.body, headers={"x-ingle-cache-salt": canary.tenant}
    ) as answer:
        assert answer.status == 200, await answer.text()
        told = (await answer.json())["choices"][0]["logprobs"]
        return list(zip(told["tokens"], told["token_logprobs"], strict=True))


async def leave(client: aiohttp.ClientSession, canary: Canary, after_s: float) -> None:
    """Ask for a long reply, and go in the midst of it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            await ask(client, Canary({**canary.body, "max_tokens": 300}, canary.tenant))


async def watch(replica: Replica, rounds: int, number: int) -> Found:
    draw = random.Random(number)
    canaries = [made(draw, kind) for kind in range(KINDS)]
    before = replica.metrics()
    found = Found()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(str(replica.client.base_url), connector=connector) as client:
        alone = [await ask(client, canary) for canary in canaries]
        for _ in range(rounds):
            kinds = [draw.randrange(KINDS) for _ in range(AT_ONCE)]
            leavers = [leave(client, draw.choice(canaries), draw.uniform(0.001, 0.2)) for _ in range(LEAVERS)]
            told, _ = await asyncio.gather(
                asyncio.gather(*(ask(client, canaries[kind]) for kind in kinds)), asyncio.gather(*leavers)
            )
            for kind, said in zip(kinds, told, strict=True):
                found.asked += 1
                if said != alone[kind]:
                    found.leaks.append((canaries[kind], alone[kind], said))
    eventually(replica.idle)
    after = replica.metrics()

    def grown(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    found.preemptions = grown("ingle_engine_preemptions_total")
    found.cancelled = grown("ingle_requests_cancelled_total")
    return found


@contextlib.contextmanager
def cage(folder: Path, model: str = "") -> Iterator[Replica]:
    """A replica of a catalogued model, or of a tiny one that talks nonsense fast."""
    path = pull(model) if model else folder / "model.gguf"
    if not model:
        tiny.write_gguf(tiny.make("llama", max_position_embeddings=2048), path, **byte_level_fields(tiny.VOCABULARY))
    with running(path, folder / "log", *FLAGS) as replica:
        yield replica


def main() -> int:
    parser = argparse.ArgumentParser(prog="make canaries ARGS=…")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="", help="a catalogued one instead of the tiny one")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, cage(Path(folder), arguments.model) as replica:
        found = asyncio.run(watch(replica, arguments.rounds, arguments.seed))
    print(
        f"canaries {'LEAKED' if found.leaks else 'ok'} rounds={arguments.rounds} asked={found.asked} "
        f"leaks={len(found.leaks)} preemptions={found.preemptions:.0f} cancelled={found.cancelled:.0f} "
        f"seconds={time.monotonic() - started:.0f}"
    )
    for canary, alone, said in found.leaks[:3]:
        print(f"{canary}\n  alone  {alone}\n  among  {said}")
    return 1 if found.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
