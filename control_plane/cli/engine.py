"""`ingle engine …` and `ingle model …`: handed over to the data plane's own program.

By exec and by name, so that the two halves share no code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import typer

from control_plane.errors import ConfigError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_PROGRAM = "data_plane"


def engine(context: typer.Context) -> None:
    """A replica alone, without a control plane: `ingle engine serve MODEL`."""
    _hand_over(context.args)


def model(context: typer.Context) -> None:
    """Models: `ingle model pull NAME`, `ingle model inspect NAME`."""
    _hand_over(["model", *context.args])


def _hand_over(arguments: Sequence[str]) -> None:
    for needed in (_PROGRAM, "torch"):
        if find_spec(needed) is None:
            raise ConfigError(f"this needs the engine, and {needed} isn't installed: pip install 'ingle[engine]'")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", _PROGRAM, *arguments])  # noqa: S606
