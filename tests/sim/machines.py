"""A cloud of machines over HTTP, in a process of its own, and the provider that a controller reaches it by.

What is asked of it happens though whoever asked is dead by then. Each run has an account of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from control_plane.domain import Address, Description, Offer, Phase, ReplicaSpec
from control_plane.errors import ProviderError

HOST = "127.0.0.1"
_START_SECONDS = 0.01
_END_SECONDS = 0.01


@dataclass
class Machine:
    """`site` answers as a replica does; None until it is up."""

    site: web.SockSite | None = None
    port: int = 0


@dataclass
class Account:
    """`began`: every id that was ever asked for; none begins twice."""

    began: set[str] = field(default_factory=set)
    machines: dict[str, Machine] = field(default_factory=dict)


class Cloud:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._replica: web.AppRunner
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, told: int) -> None:
        """For ever; the port is written to the descriptor `told`."""
        replica = web.Application()
        replica.router.add_get("/health", _health)
        replica.router.add_post("/v1/completions", _complete)
        self._replica = web.AppRunner(replica, access_log=None)
        await self._replica.setup()
        app = web.Application()
        app.router.add_get("/{account}", self._list)
        app.router.add_put("/{account}/{id}", self._create)
        app.router.add_get("/{account}/{id}", self._describe)
        app.router.add_delete("/{account}/{id}", self._end)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        listener = socket.create_server((HOST, 0))
        await web.SockSite(runner, listener).start()
        os.write(told, str(listener.getsockname()[1]).encode())
        os.close(told)
        await asyncio.Event().wait()

    def _account(self, request: web.Request) -> Account:
        return self._accounts.setdefault(request.match_info["account"], Account())

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response(sorted(self._account(request).machines))

    async def _create(self, request: web.Request) -> web.Response:
        account, name = self._account(request), request.match_info["id"]
        if name not in account.began:
            account.began.add(name)
            await self._go_on(self._begin(account, name, float(request.query["seconds"])))
        return web.json_response({})

    async def _begin(self, account: Account, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        machine = account.machines[name] = Machine()
        self._spawn(self._start(account, name, machine))

    async def _start(self, account: Account, name: str, machine: Machine) -> None:
        await asyncio.sleep(_START_SECONDS)
        listener = socket.create_server((HOST, 0))
        site = web.SockSite(self._replica, listener)
        await site.start()
        if account.machines.get(name) is machine:
            machine.site, machine.port = site, listener.getsockname()[1]
        else:
            await site.stop()

    async def _describe(self, request: web.Request) -> web.Response:
        machine = self._account(request).machines.get(request.match_info["id"])
        return web.json_response(None if machine is None else {"port": machine.port})

    async def _end(self, request: web.Request) -> web.Response:
        await self._go_on(self._stop(self._account(request), request.match_info["id"]))
        return web.json_response({})

    async def _stop(self, account: Account, name: str) -> None:
        await asyncio.sleep(_END_SECONDS)
        machine = account.machines.pop(name, None)
        if machine is not None and machine.site is not None:
            await machine.site.stop()

    async def _go_on(self, work: Any) -> None:
        """Wait for `work`, which goes on if the wait is given up."""
        await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _health(_: web.Request) -> web.Response:
    return web.json_response({"running": 0, "waiting": 0})


async def _complete(_: web.Request) -> web.Response:
    return web.json_response({"choices": []})


@contextmanager
def cloud() -> Generator[str]:
    """Its URL. It ends with this context."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            asyncio.run(Cloud().serve(writer))
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with os.fdopen(reader) as told:
            yield f"http://{HOST}:{int(told.read())}"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def inventory(account: str) -> list[str]:
    """Ids of all machines of the account at that URL."""
    with urllib.request.urlopen(account, timeout=10) as answer:
        found: list[str] = json.load(answer)
        return found


class Provider:
    """One account of the cloud: see `control_plane.providers.base`."""

    def __init__(self, account: str, region: str) -> None:
        self.create_seconds = 0.0
        """How long the cloud takes for a creation."""
        self._account = account
        self._region = region
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))

    async def offers(self) -> Sequence[Offer]:
        return [Offer(self._region, "cpu", 1, 1.0)]

    async def ensure(self, spec: ReplicaSpec) -> None:
        await self._ask("PUT", f"{spec.replica_id}?seconds={self.create_seconds}")

    async def describe(self, replica_id: str) -> Description:
        found = await self._ask("GET", replica_id)
        if found is None:
            return Description(Phase.ABSENT)
        return (
            Description(Phase.RUNNING, Address(HOST, found["port"])) if found["port"] else Description(Phase.STARTING)
        )

    async def list_owned(self) -> Sequence[str]:
        found: list[str] = await self._ask("GET")
        return found

    async def drain(self, replica_id: str) -> None:
        await self._ask("GET", replica_id)  # a machine here has nothing to finish

    async def terminate(self, replica_id: str) -> None:
        await self._ask("DELETE", replica_id)

    async def _ask(self, method: str, what: str = "") -> Any:
        try:
            async with self._session.request(method, f"{self._account}/{what}".rstrip("/")) as answer:
                return await answer.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ProviderError(f"{method} failed ({type(error).__name__})", code="timeout") from error
