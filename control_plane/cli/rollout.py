"""`ingle endpoint history|rollback|promote|evidence`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TextIO

import typer

from control_plane.cli import options
from control_plane.cli.endpoint import PATIENCE, Name, finish
from control_plane.cli.output import say, show_list
from control_plane.cli.waiting import settled
from control_plane.errors import InvalidInput

COLUMNS = ("generation", "at", "outcome", "changed", "code", "reason")


def add_to(app: typer.Typer) -> None:
    for command in (history, rollback, promote, evidence):
        app.command()(command)


def history(name: Name, output: options.Output = options.Format.TABLE, profile: options.ProfileFile = None) -> None:
    """What an endpoint was asked to be, generation by generation, and what became of that."""
    with options.connect(profile) as client:
        show_list(client.generations(name), COLUMNS, output)


def rollback(
    name: Name,
    to: Annotated[
        int | None, typer.Option("--to", min=1, help="A generation; the last that served before, if not given.")
    ] = None,
    wait: options.Wait = False,
    timeout: options.Patience = PATIENCE,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Ask again for what an earlier generation was, all of it. What still runs of it serves at once."""
    with options.connect(profile) as client:
        last = max((event.id for event in client.events(name, limit=1)), default=0)
        after = client.roll_back(name, to)
        told = [event.message for event in client.events(name, after=last) if event.kind == "rolled_back"]
        say(told[-1] if told else "nothing differs")
        finish(client, after, settled, wait, timeout, output)


def promote(
    name: Name,
    wait: options.Wait = False,
    timeout: options.Patience = PATIENCE,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Roll a canary out: it takes all requests, and what served before goes."""
    with options.connect(profile) as client:
        finish(client, client.promote(name), settled, wait, timeout, output)


def evidence(
    name: Name,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Write there instead of to stdout.")] = None,
    profile: options.ProfileFile = None,
) -> None:
    """Where it ran, by which keys it was used, what was kept and what deleted: signed lines, each chained to the last.

    `ingle audit verify FILE --public-key KEY` checks them anywhere.
    """
    with options.connect(profile) as client:
        lines = client.evidence(name)
        if file is None:
            count = _put(lines, sys.stdout)
        else:
            part = file.with_name(f"{file.name}.part")  # what is cut off doesn't come to bear the name
            try:
                with part.open("w") as out:
                    count = _put(lines, out)
                part.replace(file)
            except OSError as error:
                raise InvalidInput(f"{file} can't be written: {error.strerror}", param="file") from None
    say(f"{count} records")


def _put(lines: Iterable[str], out: TextIO) -> int:
    count = 0
    for line in lines:
        out.write(f"{line}\n")
        count += 1
    return count
