"""`ingle doctor`: what is well here, what isn't, and what to do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from control_plane.cli import options
from control_plane.cli.output import say, show_list

if TYPE_CHECKING:
    from control_plane.cli.checks import Check

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(home: options.Home = None, output: options.Output = options.Format.TABLE) -> None:
    """Check this machine and the installation on it. Exits 1 where something fails."""
    from control_plane.cli import checks, reach
    from control_plane.config import load_settings

    settings = load_settings({"home": home})
    checkers = (
        checks.versions, checks.accelerator, checks.processor, checks.disk, checks.provider, checks.database,
        reach.listeners, reach.admin,
    )  # fmt: skip
    found = []
    for check in checks.examine(settings, checkers):
        found.append(check)
        if output is options.Format.TABLE:
            _print(check)
    if output is not options.Format.TABLE:
        show_list(found, (), output)
    failed, warned = (sum(check.status == status for check in found) for status in ("fail", "warn"))
    say(f"{len(found)} checks: {failed} failed, {warned} to look at")
    if failed:
        raise typer.Exit(1)


def _print(check: Check) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text(f"{check.status:<5}", style=_COLORS[check.status]) + Text(f"{check.name:<18} {check.found}", style="")
    if check.do:
        line += Text(f"\n{'':<24}→ {check.do}", style="")
    # a pipe has no width to fold at
    Console(soft_wrap=True, width=None if sys.stdout.isatty() else 2000, highlight=False).print(line)
