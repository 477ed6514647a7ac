"""`ingle apply`, `ingle diff`, `ingle export`: what is to be, in files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane.cli import options
from control_plane.cli.output import say
from control_plane.cli.waiting import never, settled, wait_for
from control_plane.errors import IngleError, InvalidInput

if TYPE_CHECKING:
    from control_plane.client import AdminClient
    from control_plane.specs import Change, Spec

PATIENCE = 600.0
_REFUSABLE = frozenset({"model", "gpu", "gpus", "preset", "engine_args"})
"""What an update may be refused for by more than its document alone."""
Files = Annotated[
    list[Path], typer.Option("--file", "-f", help="A file of YAML documents, or - for stdin; may be repeated.")
]
Prune = Annotated[bool, typer.Option("--prune", help="Delete endpoints of the same tenants that the files don't have.")]


def add_to(app: typer.Typer) -> None:
    for command in (apply, diff, export):
        app.command()(command)


def apply(
    file: Files,
    prune: Prune = False,
    yes: options.Yes = False,
    wait: options.Wait = True,
    timeout: options.Patience = PATIENCE,
    profile: options.ProfileFile = None,
) -> None:
    """Make it so. What is as its file says is left alone; one that fails leaves what served serving."""
    with options.connect(profile) as client:
        changes = _changes(client, _read(file), prune)
        for change in changes:
            print(change)
        _check(client, changes)
        doomed = [change for change in changes if change.verb in ("move", "delete")]
        if doomed:
            names = ", ".join(change.name for change in doomed)
            options.confirm(f"{names}: what runs is ended, and deleted. Go on?", yes)
        failed = []
        for change in changes:
            _do(client, change, timeout)
        for change in changes if wait else ():
            if change.kind == "endpoint" and change.verb in ("create", "update", "move"):
                try:
                    wait_for(client, change.name, settled, timeout)
                except IngleError as error:
                    failed.append(str(error.message))
        kept = {change.name for change in changes if change.kind == "endpoint" and change.verb == "keep"}
        for endpoint in client.endpoints() if wait and kept else ():
            if endpoint.name in kept and endpoint.given_up:
                failed.append(f"{endpoint.name} failed before: {endpoint.reason.message} ({endpoint.reason.code})")
        if failed:
            raise IngleError("\n".join(failed))


def diff(
    file: Files,
    prune: Prune = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 where anything differs.")] = False,
    profile: options.ProfileFile = None,
) -> None:
    """What `apply` would do."""
    with options.connect(profile) as client:
        changes = [change for change in _changes(client, _read(file), prune) if change.verb != "keep"]
        for change in changes:
            print(change)
        _check(client, changes)
    if not changes:
        say("nothing differs")
    if changes and exit_code:
        raise typer.Exit(1)


def export(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Endpoints; all, if none.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="The JSON Schema of a document, for editors.")] = False,
    profile: options.ProfileFile = None,
) -> None:
    """What is, as documents that `apply` takes."""
    from control_plane import specs

    if schema:
        print(json.dumps(specs.json_schema(), indent=2))
        return
    with options.connect(profile) as client:
        endpoints = [client.endpoint(name) for name in names] if names else client.endpoints()
        print(specs.export(endpoints, [] if names else client.tenants()), end="")


def _read(files: list[Path]) -> list[Spec]:
    from control_plane import specs

    found: list[Spec] = []
    for path in files:
        try:
            text = sys.stdin.read(specs.MOST_BYTES + 1) if str(path) == "-" else path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} can't be read: {error}", param="file") from None
        found += specs.parse(text, str(path))
    specs.check(found)
    return found


def _changes(client: AdminClient, wanted: list[Spec], prune: bool) -> list[Change]:
    from control_plane import specs

    return specs.compare(wanted, client.endpoints(), client.tenants(), prune=prune)


def _check(client: AdminClient, changes: list[Change]) -> None:
    """Before anything is done: raises InvalidInput with all that would be refused halfway."""
    from control_plane import specs

    wrong = []
    for change in changes:
        asks = change.verb in ("create", "move") or (change.verb == "update" and _REFUSABLE & change.fields.keys())
        if change.kind == "endpoint" and change.spec is not None and asks:
            try:
                client.check_endpoint(specs.body_of(change.spec))
            except InvalidInput as error:
                wrong.append(f"endpoint {change.name}: {error.message}")
    if wrong:
        raise InvalidInput("\n".join(wrong), param="file")


def _do(client: AdminClient, change: Change, timeout: float) -> None:
    from control_plane import specs

    if change.verb in ("delete", "move"):
        client.delete_endpoint(change.name)
    if change.verb == "move":
        # a name is free again once all that ran under it has ended
        wait_for(client, change.name, never, timeout)
    if change.spec is None or change.verb == "keep":
        return
    if change.kind == "tenant":
        if change.verb == "create":
            client.create_tenant(change.name)
        client.limit_tenant(change.name, specs.changes_of(change))
    elif change.verb == "update":
        client.update_endpoint(change.name, specs.changes_of(change), if_generation=change.generation)
    else:
        client.create_endpoint(specs.body_of(change.spec))
