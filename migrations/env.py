"""Alembic's door: runs the revisions in `versions/` on the database named by the caller.

For writing a new revision: `INGLE_DATABASE_URL=… alembic --config migrations/alembic.ini revision --autogenerate`.
"""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import create_engine

from control_plane.store.database import sync_url
from control_plane.store.models import Base


def run() -> None:
    url = context.config.attributes.get("url") or sync_url(os.environ["INGLE_DATABASE_URL"])
    engine = create_engine(url)
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True, compare_type=True)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


run()
