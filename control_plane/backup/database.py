"""The database as one file, and back: SQLite by its online backup, PostgreSQL by its own programs."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import IO

from psycopg.conninfo import make_conninfo
from sqlalchemy import inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError

from control_plane.errors import ConfigError, StoreUnavailable
from control_plane.observe.logs import redact
from control_plane.store.database import TIMEOUT
from control_plane.store.schema import sync_engine

SQLITE, POSTGRES = "ingle.db", "ingle.pgdump"
_SECONDS = 3600.0
_LOCK_MILLISECONDS = 10_000


def dump(url: str, folder: Path) -> Path:
    """A copy of the database as of one moment, in `folder`. Nothing has to be stopped for it.

    Raises ConfigError, StoreUnavailable.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _copy(_path_of(parsed), folder / SQLITE)
    to = folder / POSTGRES
    with to.open("wb") as file:
        options = ["--format=custom", "--no-owner", "--no-privileges", f"--lock-wait-timeout={_LOCK_MILLISECONDS}"]
        _run("pg_dump", options, parsed, stdout=file)
    return to


def require_empty(url: str, kind: str) -> None:
    """Raises ConfigError unless what `dump` named `kind` can be loaded into the database at `url`."""
    parsed = make_url(url)
    if (parsed.get_backend_name() == "sqlite") != (kind == SQLITE):
        wanted = "SQLite" if kind == SQLITE else "PostgreSQL"
        raise ConfigError(f"the backup is of {wanted}, and database_url isn't", param="database_url")
    if kind == SQLITE:
        filled = _path_of(parsed).exists()
    else:
        _program("pg_restore")
        engine = sync_engine(url)
        try:
            filled = bool(inspect(engine).get_table_names())
        except DBAPIError as error:
            raise StoreUnavailable(f"the database can't be reached ({type(error.orig).__name__})") from None
        finally:
            engine.dispose()
    if filled:
        message = "the database that database_url names isn't empty: a backup comes back into an empty one alone"
        raise ConfigError(message, code="database_not_empty", param="database_url")


def load(file: Path, url: str) -> None:
    """What `dump` made becomes the database at `url`, all of it or nothing. Raises ConfigError, StoreUnavailable."""
    parsed = make_url(url)
    if file.name == SQLITE:
        _copy(file, _path_of(parsed))
    else:
        options = ["--exit-on-error", "--single-transaction", "--no-owner", "--no-privileges", str(file)]
        _run("pg_restore", options, parsed)


def _path_of(url: URL) -> Path:
    return Path(url.database or "")


def _copy(source: Path, to: Path) -> Path:
    if not source.is_file():
        raise ConfigError(f"there is no database at {source}", param="database_url")
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=TIMEOUT)) as from_,
            closing(sqlite3.connect(to)) as copy,
        ):
            from_.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
            (found,) = copy.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        raise StoreUnavailable(f"the database can't be copied ({error})") from None
    if found != "ok":
        raise StoreUnavailable(f"the database is damaged: {found}")
    return to


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        message = (
            f"{name} isn't installed: it comes with PostgreSQL's client programs, of the server's version or newer"
        )
        raise ConfigError(message, code=f"{name}_missing")
    return found


def _run(name: str, options: list[str], url: URL, stdout: IO[bytes] | int = subprocess.DEVNULL) -> None:
    program = _program(name)
    more = {name: value if isinstance(value, str) else ",".join(value) for name, value in url.query.items()}
    password = more.pop("password", None) or url.password
    where = make_conninfo(host=url.host, port=url.port, user=url.username, dbname=url.database, **more)
    # anybody on the machine sees a program's arguments
    environment = {**os.environ, **({"PGPASSWORD": str(password)} if password else {})}
    try:
        done = subprocess.run(
            [program, "--no-password", f"--dbname={where}", *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise StoreUnavailable(f"{name} took longer than {_SECONDS:g} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise StoreUnavailable(f"{name} failed: {redact(said[-1])[:300] if said else done.returncode}")
