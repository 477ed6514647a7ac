"""From a populated database of every earlier revision to this one, on both databases, beside the old version."""

from __future__ import annotations

from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import JSON, Boolean, Float, Integer, LargeBinary, MetaData, Table, create_engine, func, insert, select
from sqlalchemy.engine import Connection

from control_plane.domain import EndpointState, ReplicaState
from control_plane.store import endpoints, replicas
from control_plane.store.database import Store, sync_url
from control_plane.store.schema import _config, upgrade_schema

REVISIONS = [revision.revision for revision in ScriptDirectory.from_config(_config("sqlite://")).walk_revisions()][1:]
MEANT: dict[tuple[str, str], Any] = {
    ("endpoints", "state"): EndpointState.READY,
    ("endpoints", "deleted_at"): None,
    ("endpoints", "engine_args"): ["--a"],
    ("endpoints", "max_replicas"): 2000,
    ("replicas", "state"): ReplicaState.READY,
    ("replicas", "rung"): "hot",
    ("endpoints", "schedule"): [],
}


def fill(connection: Connection, metadata: MetaData, suffix: str) -> None:
    """A row in every table, as the version of that revision would write it."""
    for table in metadata.sorted_tables:
        if table.name in ("alembic_version", "counters"):
            continue
        connection.execute(
            insert(table).values({column.name: _value(table, column, suffix) for column in table.columns})
        )


def rows(connection: Connection, metadata: MetaData) -> dict[str, int | None]:
    return {
        table.name: connection.scalar(select(func.count()).select_from(table))
        for table in metadata.sorted_tables
        if table.name not in ("alembic_version", "counters")  # migrations add to these
    }


def _value(table: Table, column: Any, suffix: str) -> Any:
    if (table.name, column.name) in MEANT:
        return MEANT[table.name, column.name]
    if column.nullable:
        return None
    if column.foreign_keys:
        return f"{next(iter(column.foreign_keys)).column.table.name}-id-{suffix}"
    kind = column.type
    if isinstance(kind, JSON):
        return {}
    if isinstance(kind, LargeBinary):
        return suffix.encode()
    if isinstance(kind, Boolean):
        return False
    if isinstance(kind, Integer):
        return 101 if suffix == "a" else 102
    if isinstance(kind, Float):
        return 1.5
    return f"{table.name}-{column.name}-{suffix}"[-60:]


@pytest.mark.parametrize("revision", REVISIONS)
async def test_from_every_revision(database_url: str, revision: str) -> None:
    command.upgrade(_config(database_url), revision)
    engine = create_engine(sync_url(database_url))
    old = MetaData()
    old.reflect(engine)
    with engine.begin() as connection:
        fill(connection, old, "a")
        before = rows(connection, old)
    assert upgrade_schema(database_url).up_to_date
    with engine.begin() as connection:
        assert rows(connection, old) == before
        # a process of the version before goes on writing what it knows
        fill(connection, old, "b")
    store = Store(database_url)
    try:
        async with store.read() as session:
            known = await endpoints.list_endpoints(session)
            assert {endpoint.state for endpoint in known} == {EndpointState.READY}
            assert len(known) == 2
            assert len(await replicas.live_replicas(session)) == 2
    finally:
        await store.close()
        engine.dispose()
