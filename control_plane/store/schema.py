"""Brings a database to the schema of this version, or says how far it is from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError

from control_plane.errors import ConfigError, StoreUnavailable
from control_plane.store.database import TIMEOUT, sync_url

if TYPE_CHECKING:
    from alembic.config import Config


@dataclass(frozen=True)
class SchemaStatus:
    current: str | None
    head: str | None
    known: bool
    """Whether this version of ingle knows the database's revision."""

    @property
    def up_to_date(self) -> bool:
        return self.current == self.head


def schema_status(url: str) -> SchemaStatus:
    """Where the database at `url` stands. Raises StoreUnavailable."""
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    script = ScriptDirectory.from_config(_config(url))
    head = script.get_current_head()
    engine = sync_engine(url)
    try:
        with engine.connect() as connection:
            current = MigrationContext.configure(connection).get_current_revision()
    except DBAPIError as error:
        raise StoreUnavailable(f"the database can't be reached ({type(error.orig).__name__})") from error
    finally:
        engine.dispose()
    known = current is None or current in {revision.revision for revision in script.walk_revisions()}
    return SchemaStatus(current, head, known)


def upgrade_schema(url: str) -> SchemaStatus:
    """Migrate the database at `url` to the newest schema. Safe to repeat. Raises ConfigError, StoreUnavailable."""
    from alembic import command

    status = schema_status(url)
    _refuse_unknown(status)
    if not status.up_to_date:
        logging.getLogger("alembic").setLevel(logging.WARNING)
        try:
            command.upgrade(_config(url), "head")
        except DBAPIError as error:
            raise StoreUnavailable(f"the migration failed ({type(error.orig).__name__})") from error
    return schema_status(url)


def require_schema(url: str) -> None:
    """Raise ConfigError unless the database at `url` has exactly this version's schema."""
    status = schema_status(url)
    _refuse_unknown(status)
    if not status.up_to_date:
        raise ConfigError(
            f"the database is at revision {status.current or 'none'}, this version needs {status.head}: "
            "run `ingle db upgrade`",
            code="schema_outdated",
        )


def _refuse_unknown(status: SchemaStatus) -> None:
    if not status.known:
        raise ConfigError(
            f"the database is at revision {status.current}, which this version of ingle doesn't know: "
            "upgrade ingle to the version that wrote it",
            code="schema_unknown",
        )


def sync_engine(url: str) -> Engine:
    """The database at `url` through a driver that blocks, for commands."""
    timeout = {"timeout": TIMEOUT} if url.startswith("sqlite") else {"connect_timeout": int(TIMEOUT)}
    return create_engine(sync_url(url), connect_args=timeout)


def _config(url: str) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(files("migrations")))
    config.attributes["url"] = sync_url(url)
    return config
