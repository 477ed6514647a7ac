"""Each alert has a runbook, and what runbooks tell people to type exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from control_plane.alerts.catalogue import CATALOGUE, RUNBOOKS, Alert
from control_plane.cli.root import app

PASSED_ON = {"engine", "model"}
BOOKS = sorted(Path(RUNBOOKS).glob("*.md"))


def commands(text: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("alert", CATALOGUE, ids=lambda alert: alert.name)
def test_every_alert_has_a_runbook(alert: Alert) -> None:
    text = Path(alert.runbook).read_text()
    assert text.startswith(f"# {alert.name}\n")
    for part in ("## Confirm", "## Do"):
        assert part in text
    assert commands(text)


def test_there_is_no_runbook_without_an_alert() -> None:
    assert {str(path) for path in BOOKS} == {alert.runbook for alert in CATALOGUE}


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_every_command_exists(path: Path) -> None:
    for words in commands(path.read_text()):
        assert words[0] == "ingle"
        command: Any = typer.main.get_command(app)
        rest = words[1:]
        while hasattr(command, "commands"):
            assert rest[0] in command.commands, words
            command, rest = command.commands[rest[0]], rest[1:]
        if words[1] not in PASSED_ON:
            # raises where an option or the number of arguments is wrong
            command.make_context(words[1], list(rest))


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        assert (path.parent / target).exists()
