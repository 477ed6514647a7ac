from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest

from control_plane.client import AdminClient
from control_plane.store.database import Store
from control_plane.store.schema import upgrade_schema
from tests.control_plane.harness import Aws, Installation, free_port, installed, until


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """One `ingle up` for the tests that leave it as they found it."""
    with installed(tmp_path_factory.mktemp("shared") / "home") as installation:
        installation.up()
        yield installation


@pytest.fixture(scope="session")
def admin(platform: Installation) -> Iterator[AdminClient]:
    """An administrator of `platform`."""
    with platform.admin() as client:
        yield client


@pytest.fixture(scope="session")
def second_gateway(platform: Installation) -> str:
    """The root of another gateway of the platform's first region, in a process of its own."""
    program = platform.start("serve", "gateway", "-r", "local-eu", "--gateway", "127.0.0.1:0")
    root: str = program.facts["gateways"]["local-eu"]
    return root


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    """An AWS of our own, spoken to over HTTP."""
    port = free_port()
    log = (tmp_path_factory.mktemp("aws") / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
    )
    found = Aws(f"http://127.0.0.1:{port}")
    try:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in found.environment.items():
                environment.setenv(name, value)
            until(lambda: process.poll() is None and found.answers(), "AWS is up")
            yield found
    finally:
        process.terminate()
        process.wait(10)
        log.close()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Installation]:
    """A home of a test's own; it starts what it needs."""
    with installed(tmp_path / "home") as installation:
        yield installation


def _execute(server: str, statement: str) -> None:
    with psycopg.connect(server.replace("+psycopg", "") + "postgres", autocommit=True) as connection:
        connection.execute(statement.encode())


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server of our own, run by a user that may not be root."""
    programs = _programs()
    if programs is None:
        pytest.skip("the PostgreSQL server programs (initdb, pg_ctl) aren't installed")
    user = "postgres" if os.getuid() == 0 else None
    if user and (shutil.which("runuser") is None or subprocess.run(["id", user], capture_output=True).returncode):
        pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres to run it as")
    prefix = ["runuser", "-u", user, "--"] if user else []
    folder = Path(subprocess.run([*prefix, "mktemp", "-d"], check=True, capture_output=True, text=True).stdout.strip())
    data, port = folder / "data", free_port()

    def run(*command: str) -> None:
        subprocess.run([*prefix, *command], check=True, capture_output=True, cwd=folder, timeout=60)

    run(str(programs / "initdb"), "-D", str(data), "-U", "ingle", "-A", "trust", "--no-sync")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    run(str(programs / "pg_ctl"), "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        yield f"postgresql+psycopg://ingle@127.0.0.1:{port}/"
    finally:
        run(str(programs / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")
        run("rm", "-rf", str(folder))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'test.db'}"
    server: str = request.getfixturevalue("postgres_url")
    name = f"t{os.urandom(6).hex()}"
    _execute(server, f"CREATE DATABASE {name}")
    return server + name


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database to copy: migrating takes longer than most tests."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    upgrade_schema(f"sqlite+aiosqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres_url: str) -> str:
    """The name of a migrated database to copy."""
    _execute(postgres_url, "CREATE DATABASE migrated")
    upgrade_schema(f"{postgres_url}migrated")
    return "migrated"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """A migrated database without records, of each kind in turn."""
    if request.param == "sqlite":
        path = tmp_path / "test.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        url = f"sqlite+aiosqlite:///{path}"
    else:
        server: str = request.getfixturevalue("postgres_url")
        name = f"t{os.urandom(6).hex()}"
        _execute(server, f"CREATE DATABASE {name} TEMPLATE {request.getfixturevalue('postgres_template')}")
        url = server + name
    store = Store(url)
    yield store
    await store.close()
