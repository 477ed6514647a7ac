"""`ingle backup …`: works on a home and its database, whether anything runs there or not."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane.cli import options
from control_plane.cli.output import say, show_one
from control_plane.cli.run import local_settings

if TYPE_CHECKING:
    from control_plane.backup.work import Backup

app = typer.Typer(no_args_is_help=True, help="Backups: one sealed file, and back from it.")
File = Annotated[Path, typer.Argument(help="The backup.")]
KeyringFile = Annotated[
    Path | None,
    typer.Option(
        "--keyring",
        exists=True,
        dir_okay=False,
        readable=True,
        help="The local keys that seal it; without it, what the settings say.",
    ),
]


@app.command("create")
def create(file: File, home: options.Home = None, output: options.Output = options.Format.TABLE) -> None:
    """Write database, settings, sealed secrets and certificates to a new file. Nothing has to be stopped for it."""
    from control_plane.app import keyring_of
    from control_plane.backup import work

    settings = local_settings(home)
    _show(work.create(settings, keyring_of(settings), file, version("ingle")), output)
    say("keep the keyring elsewhere, as it is now: nothing else opens the backup")


@app.command("verify")
def verify(
    file: File,
    keyring: KeyringFile = None,
    home: options.Home = None,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Whether every byte of it is as it was written; exits 1 where it isn't."""
    from control_plane.app import keyring_of
    from control_plane.backup import work

    _show(work.verify(file, keyring_of(local_settings(home, keyring))), output)


@app.command("restore")
def restore(
    file: File,
    keyring: KeyringFile = None,
    home: options.Home = None,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Bring an installation back in an empty home, with an empty database; `ingle up` then goes on."""
    from control_plane.app import keyring_of
    from control_plane.backup import work

    settings = local_settings(home)
    _show(work.restore(file, settings.home, keyring, keyring_of, time.time()), output)
    say(f"{settings.home} is as it was then: the installation that it was made of must not run any more")


def _show(found: Backup, output: options.Format) -> None:
    from dataclasses import asdict

    from pydantic import BaseModel

    class Shown(BaseModel):
        created_at: str
        version: str
        jurisdiction: str | None
        regions: dict[str, str | None]
        accepts: list[str]
        files: int
        bytes: int
        digest: str

    show_one(Shown(**asdict(found)), output)
