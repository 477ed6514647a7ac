"""The doors between the rooms: import contracts, and what a host without the engine needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_import_contracts_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_the_control_plane_loads_no_tensor_library() -> None:
    code = "import sys, control_plane.app, control_plane.cli.root; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "control_plane" in loaded
    assert not loaded & {"torch", "triton", "numpy", "data_plane", "kernels"}
