"""Prints results: data to stdout, talk to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from control_plane.cli.options import Format

if TYPE_CHECKING:
    from rich.table import Table

_PIPE_WIDTH = 2000


def show_list(items: Sequence[BaseModel], columns: Sequence[str], output: Format) -> None:
    """A list: an array, or a table of `columns` (a dotted name looks inside)."""
    data = [item.model_dump(mode="json") for item in items]
    if output is not Format.TABLE:
        _dump(data, output)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.replace("_", " ").replace(".", " "), overflow="fold")
    for row in data:
        table.add_row(*(_cell(_look(row, column)) for column in columns))
    _print(table)


def show_one(item: BaseModel, output: Format, *, skip: Sequence[str] = ()) -> None:
    """One thing: an object, or its fields one a line."""
    data = item.model_dump(mode="json")
    if output is not Format.TABLE:
        _dump(data, output)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in data.items():
        if name not in skip:
            table.add_row(name.replace("_", " "), _cell(value))
    _print(table)


def say(text: str) -> None:
    """Talk, for a person."""
    print(text, file=sys.stderr, flush=True)


def _print(table: Table) -> None:
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(table)
        return
    # A pipe has no width to fold at.
    console = Console(width=_PIPE_WIDTH)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())


def _dump(data: Any, output: Format) -> None:
    if output is Format.JSON:
        print(json.dumps(data, indent=2, ensure_ascii=False))
        return
    import yaml

    print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")


def _look(row: dict[str, Any], path: str) -> Any:
    value: Any = row
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _cell(value: Any) -> str:
    from rich.markup import escape

    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return escape(", ".join(_cell(item) for item in value)) or "–"
    if isinstance(value, dict):
        return escape(" ".join(f"{name}={inner}" for name, inner in value.items() if inner not in (None, "")))
    return escape(str(value))
