"""`kill -9` in loops, under load: replicas, controllers and gateways of one installation on PostgreSQL.

`INGLE_KILLS=100,50,50` sets how many of each; the suite has time for a few.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psycopg
import pytest

from control_plane.client import AdminClient
from control_plane.store.schema import upgrade_schema
from tests.control_plane.harness import Installation, Program, chat, create, free_port, replica_pids, until

KILLS = tuple(int(count) for count in os.environ.get("INGLE_KILLS", "6,4,4").split(","))
MODEL = "tokens-20+pace-10ms"
WHOLE = "".join(f"t{number} " for number in range(20))
CLIENTS = 8
PATIENCE = 40.0
"""Seconds in which every request must have an answer, whatever kind it is."""


@dataclass
class Load:
    """Clients that ask again and again. What became of each request is counted; what must not be is kept."""

    roots: list[str]
    platform: Installation
    key: str
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.over.is_set():
            root = random.choice(self.roots)
            try:
                with self.platform.tenant(root, self.key, timeout=PATIENCE) as tenant:
                    for _ in range(5):
                        self._ask(tenant)
            except httpx.TimeoutException as error:
                self.wrong.append(f"no answer within {PATIENCE} s: {error!r}")
            except httpx.HTTPError:
                self.seen["gateway gone"] += 1
                time.sleep(0.05)

    def _ask(self, tenant: httpx.Client) -> None:
        with tenant.stream("POST", "/v1/chat/completions", json={**chat(), "model": "chat", "stream": True}) as answer:
            if answer.status_code != 200:
                error = json.loads(answer.read())["error"]
                self.seen[str(error["code"])] += 1
                if answer.status_code < 500:
                    self.wrong.append(f"{answer.status_code} {error}")
                return
            frames = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        if "error" in frames[-1]:
            self.seen["cut, and said so"] += 1
            return
        text = "".join(choice["delta"].get("content", "") for frame in frames for choice in frame["choices"])
        self.seen["whole"] += 1
        if text != WHOLE:
            self.wrong.append(f"called whole, but {text!r}")


@pytest.mark.postgres
@pytest.mark.slow
def test_whatever_is_killed_every_request_has_an_answer(postgres_url: str, fresh: Installation) -> None:
    with psycopg.connect(postgres_url.replace("+psycopg", "") + "postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE kills")
    fresh.more = {"INGLE_DATABASE_URL": f"{postgres_url}kills", "INGLE_TIMING__MAX_FAILURES": "1000"}
    upgrade_schema(fresh.more["INGLE_DATABASE_URL"])
    fresh.start("serve", "api", "--admin", f"127.0.0.1:{free_port()}")
    controllers = [fresh.start("serve", "controller") for _ in range(2)]
    places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    gateways = [_gateway(fresh, place) for place in places]
    with fresh.admin() as admin:
        key = admin.create_key({"name": "load"}).secret
        create(admin, "chat", MODEL, min_replicas=2, max_replicas=2)
        load = Load([gateway.facts["gateways"]["local-eu"] for gateway in gateways], fresh, key)
        clients = [threading.Thread(target=load.run) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            for what in _order():
                _kill(what, fresh, controllers, gateways, places)
                time.sleep(0.3)
        finally:
            load.over.set()
            for client in clients:
                client.join(PATIENCE + 20)
        print(f"kills {KILLS}: {dict(load.seen)}")
        assert not load.wrong, load.wrong[:5]
        assert load.seen["whole"] > 0
        until(lambda: _agrees(fresh, admin, 2), "two replicas, as the rows say")
        admin.delete_endpoint("chat")
        until(lambda: not replica_pids(fresh), "nothing is left behind")


def _gateway(fresh: Installation, place: str) -> Program:
    return fresh.start("serve", "gateway", "-r", "local-eu", "--gateway", place)


def _order() -> list[str]:
    kinds = ["replica"] * KILLS[0] + ["controller"] * KILLS[1] + ["gateway"] * KILLS[2]
    random.shuffle(kinds)
    return kinds


def _kill(
    what: str, fresh: Installation, controllers: list[Program], gateways: list[Program], places: list[str]
) -> None:
    if what == "replica":
        pids = replica_pids(fresh)
        if pids:
            os.killpg(random.choice(list(pids.values())), signal.SIGKILL)
        return
    which = random.randrange(2)
    if what == "controller":
        controllers[which].kill()
        controllers[which] = fresh.start("serve", "controller")
    else:
        gateways[which].kill()
        gateways[which] = _gateway(fresh, places[which])


def _agrees(fresh: Installation, admin: AdminClient, count: int) -> bool:
    rows = {replica.id for replica in admin.endpoint("chat").replicas if replica.state == "ready"}
    return len(rows) == count and rows == set(replica_pids(fresh))
