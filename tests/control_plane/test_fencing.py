"""Two controllers on PostgreSQL, of which one is stopped for longer than its lease, and then goes on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psycopg
import pytest

from control_plane.client import AdminClient
from control_plane.errors import StoreUnavailable
from control_plane.providers.processes import MARK, marked
from control_plane.store import database, tenants
from control_plane.store.database import Store
from control_plane.store.schema import upgrade_schema
from tests.control_plane.harness import Installation, Program, create, free_port, replica_pids, until

ROUNDS = 3


@pytest.mark.postgres
@pytest.mark.slow
def test_one_that_was_stopped_past_its_lease_starts_and_writes_nothing(postgres_url: str, fresh: Installation) -> None:
    server = postgres_url.replace("+psycopg", "")
    with psycopg.connect(server + "postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE fencing")
    fresh.more = {
        "INGLE_DATABASE_URL": f"{postgres_url}fencing",
        "INGLE_TIMING__LEASE": "2",
        "INGLE_TIMING__PROBE_TIMEOUT": "1.5",
        "INGLE_TIMING__LIVENESS_GRACE": "0.1",
    }
    upgrade_schema(fresh.more["INGLE_DATABASE_URL"])
    fresh.start("serve", "api", "--admin", f"127.0.0.1:{free_port()}")
    controllers = [fresh.start("serve", "controller") for _ in range(2)]
    with fresh.admin() as admin, psycopg.connect(f"{server}fencing", autocommit=True) as rows:
        create(admin, "chat", min_replicas=1, max_replicas=1)
        for _ in range(ROUNDS):
            _round(fresh, admin, controllers, rows)
        assert rows.execute("SELECT count(*) FROM replicas").fetchone() == (1 + ROUNDS,)


def _round(
    fresh: Installation, admin: AdminClient, controllers: list[Program], rows: psycopg.Connection[tuple[Any, ...]]
) -> None:
    def owner() -> Program | None:
        """The controller that works on the endpoint; its process id is in its name."""
        found = rows.execute("SELECT lock_owner FROM endpoints").fetchone()
        pid = found[0].split(":")[1] if found and found[0] else ""
        return next((one for one in controllers if str(one.process.pid) == pid), None)

    def ready() -> list[str]:
        return [one.id for one in admin.endpoint("chat").replicas if one.state == "ready"]

    def processes() -> list[int]:
        return [pid for replica_id in replica_pids(fresh) for pid in marked(MARK, replica_id)]

    (first,) = until(ready, "one is ready")
    stopped = until(owner, "somebody works on it")
    refused = stopped.log().count("reconciler.lease_lost")
    # it asks this replica how it is, and is stopped itself while it waits for the answer
    os.kill(replica_pids(fresh)[first], signal.SIGSTOP)
    time.sleep(0.7)
    stopped.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: owner() not in (None, stopped), "the other has taken over")
        until(lambda: ready() not in ([], [first]), "and has put another in its place")
        until(lambda: len(processes()) == 1, "the first one is gone")
        second, process = ready(), processes()
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    until(lambda: stopped.log().count("reconciler.lease_lost") > refused, "its late write is refused")
    time.sleep(1)
    assert (ready(), processes()) == (second, process)


@pytest.mark.parametrize("store", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_a_transaction_that_nobody_goes_on_with_keeps_nobody_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "ABANDONED", 0.5)
    stopped = Store(store.engine.url.render_as_string(hide_password=False))
    try:
        with pytest.raises(StoreUnavailable):
            await _abandon(stopped, store)
        async with store.read() as session:
            assert [one.created_at for one in await tenants.list_tenants(session)] == [2.0]
    finally:
        await stopped.close()


async def _abandon(stopped: Store, other: Store) -> None:
    """One transaction waits for a name that an earlier one has taken and doesn't finish."""
    async with stopped.write() as session:
        await tenants.create_tenant(session, "acme", 1.0)
        async with other.write() as waiting:
            await tenants.create_tenant(waiting, "acme", 2.0)
