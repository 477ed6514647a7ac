"""Runs a world: on a simulated loop, over a copy of a migrated database, with stand-ins for what cannot be real."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import os
import shutil
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest import mock

from sqlalchemy import ColumnElement, literal
from sqlalchemy.exc import SAWarning

from control_plane.autoscaler import loop as autoscaler_loop
from control_plane.reconciler import loop as reconciler_loop
from control_plane.reconciler import sweep as sweeping
from control_plane.store import endpoints, leases, tenants
from control_plane.store.schema import upgrade_schema
from tests.sim.clock import SimulatedLoop
from tests.sim.cloud import Prober
from tests.sim.driver import simulated_sqlite
from tests.sim.report import Broken, Report
from tests.sim.world import EPOCH, World


def run_seed(seed: int) -> Report:
    """Raises Broken, with the seed in its message."""
    return run_world(lambda folder: World(seed, folder), f"seed {seed}")


def run_world(build: Callable[[Path], World], name: str) -> Report:
    """Raises Broken, with `name` in its message."""
    warnings.filterwarnings("ignore", category=SAWarning)  # connections of the dead are collected as they lie
    with tempfile.TemporaryDirectory(prefix="ingle-sim-", dir=quick_folder()) as folder:
        shutil.copyfile(migrated(), f"{folder}/db")
        world = build(Path(folder))
        Prober.cloud = world.cloud
        runner: Awaitable[Report] | Coroutine[Any, Any, Report] = world.run()
        with (
            simulated_sqlite(),
            mock.patch.object(reconciler_loop, "Prober", Prober),
            mock.patch.object(reconciler_loop, "new_id", world.new_id),
            mock.patch.object(endpoints, "new_id", world.new_id),
            mock.patch.object(tenants, "new_id", world.new_id),
            mock.patch.object(leases, "_moment", _database_moment),
            mock.patch.object(reconciler_loop, "event", world.heard),
            mock.patch.object(sweeping, "event", world.heard),
            mock.patch.object(autoscaler_loop, "event", world.heard),
            asyncio.Runner(loop_factory=SimulatedLoop) as loop,
        ):
            gc.disable()  # what it finds depends on memory, and a seed must not
            try:
                return loop.run(runner)  # type: ignore[arg-type]
            except Exception as error:
                raise Broken(f"{name}: {error}") from error
            finally:
                gc.enable()


@functools.cache
def migrated() -> str:
    """A database to copy, which ends with this process: migrating takes as long as a run."""
    folder = tempfile.mkdtemp(prefix="ingle-sim-", dir=quick_folder())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    upgrade_schema(f"sqlite+aiosqlite:///{folder}/db")
    return f"{folder}/db"


def _database_moment(*_: object) -> ColumnElement[float]:
    """The clock of a database that several controllers share, which none of theirs moves."""
    return literal(EPOCH + asyncio.get_running_loop().time())


def quick_folder() -> str | None:
    """Memory, where there is such a folder: nothing here need outlive the run."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
