"""The database stops, goes silent, has no connection left, is read-only or drops them all: tenants don't notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import psycopg
import pytest
from sqlalchemy.engine import make_url

from control_plane.client import AdminClient
from control_plane.errors import Unavailable
from control_plane.store.schema import upgrade_schema
from tests.control_plane.harness import Installation, chat, create, free_port, until
from tests.control_plane.wire import Wire

CHAT = "/v1/chat/completions"
RECOVERY = 10.0


class Load:
    """About 20 requests a second with one key, until the end of the block."""

    def __init__(self, installation: Installation, root: str, key: str) -> None:
        self.statuses: list[int] = []
        self.longest = 0.0
        self._stop = threading.Event()
        self._tenant = installation.tenant(root, key, timeout=20)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self.statuses.append(self._tenant.post(CHAT, json=chat(model="chat", max_tokens=2)).status_code)
            self.longest = max(self.longest, time.monotonic() - began)
            self._stop.wait(0.05)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._tenant.close()


@pytest.mark.postgres
@pytest.mark.slow
def test_tenants_do_not_notice_database_trouble(postgres_url: str, fresh: Installation) -> None:
    server = make_url(postgres_url)
    wire = Wire(("127.0.0.1", server.port or 5432))
    plain = postgres_url.replace("+psycopg", "") + "postgres"

    def run(*statements: str) -> None:
        with psycopg.connect(plain, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    kill_all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'"
    run("CREATE ROLE app LOGIN", "CREATE DATABASE trouble OWNER app")
    url = f"postgresql+psycopg://app@127.0.0.1:{wire.port}/trouble"
    upgrade_schema(url)
    fresh.more = {"INGLE_DATABASE_URL": url, "INGLE_GATEWAY": f"127.0.0.1:{free_port()}"}
    fresh.start("serve", "controller")
    fresh.start("serve", "api", "--admin", f"127.0.0.1:{free_port()}")
    root = fresh.start("serve", "gateway", "-r", "local-eu").facts["gateways"]["local-eu"]

    troubles: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "stopped": (lambda: wire.set("cut"), lambda: wire.set("pass")),
        "silent": (lambda: wire.set("silent"), lambda: wire.set("pass")),
        "exhausted": (
            lambda: run("ALTER ROLE app CONNECTION LIMIT 0", kill_all),
            lambda: run("ALTER ROLE app CONNECTION LIMIT -1"),
        ),
        "read-only": (
            lambda: run("ALTER ROLE app SET default_transaction_read_only = on", kill_all),
            lambda: run("ALTER ROLE app RESET default_transaction_read_only", kill_all),
        ),
        "failed over": (lambda: run(kill_all), lambda: None),
    }
    try:
        with fresh.admin() as admin:
            key = admin.create_key({"name": "k", "requests_per_minute": 100_000}).secret
            revoked = admin.create_key({"name": "revoked"})
            create(admin, "chat", idle_timeout=600)
            with clients(fresh, root, revoked.secret, f"ingle_{'a' * 16}_{'b' * 43}") as (gone, unknown):
                assert gone.post(CHAT, json=chat(model="chat")).status_code == 200
                admin.revoke_key(revoked.id)
                answered = 1
                while status(gone) == 200:  # until the gateway has heard of it
                    answered += 1
                    assert answered < 2000
                assert status(gone) == 401
                for name, (begin, end) in troubles.items():
                    with Load(fresh, root, key) as load:
                        begin()
                        if name in ("stopped", "silent", "exhausted"):
                            until(lambda: gone.get("/readyz").status_code == 503, f"{name}: the gateway notices")
                            refused = unknown.post(CHAT, json=chat(model="chat"))
                            assert (name, refused.status_code) == (name, 503)
                            assert "retry-after" in refused.headers
                            assert status(gone) == 503  # and never 200
                        if name != "failed over":
                            assert gone.get("/livez").status_code == 200
                            with pytest.raises(Unavailable):
                                admin.create_key({"name": "never"})
                        end()
                        restored = time.monotonic()
                        until(lambda: status(unknown) == 401, f"{name}: unknown keys are refused again")
                        until(lambda: gone.get("/readyz").status_code == 200, f"{name}: ready again")
                        until(lambda: writes(admin), f"{name}: the admin API writes again")
                        assert time.monotonic() - restored < RECOVERY, name
                        assert status(gone) == 401
                    assert (name, set(load.statuses)) == (name, {200})
                    answered += len(load.statuses)
                    until(lambda: metered(admin) >= answered, f"{name}: all is metered")  # noqa: B023
                    assert (name, metered(admin)) == (name, answered)  # and once
    finally:
        wire.set("pass")
        fresh.end()
        wire.close()


def status(client: httpx.Client) -> int:
    return client.post(CHAT, json=chat(model="chat")).status_code


def metered(admin: AdminClient) -> int:
    return sum(row.requests for row in admin.usage())


def writes(admin: AdminClient) -> bool:
    try:
        admin.create_key({"name": "again"})
    except Unavailable:
        return False
    return True


@contextmanager
def clients(installation: Installation, root: str, *keys: str) -> Iterator[list[httpx.Client]]:
    made = [installation.tenant(root, key, timeout=20) for key in keys]
    try:
        yield made
    finally:
        for client in made:
            client.close()
