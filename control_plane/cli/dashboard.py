"""`ingle dashboard`: where the operator's page is."""

from __future__ import annotations

from typing import Annotated

import typer

from control_plane.cli import options
from control_plane.cli.output import say


def dashboard(
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    profile: options.ProfileFile = None,
) -> None:
    """Print the address of the operator's page."""
    from control_plane.profile import profile_path, read_profile

    path = profile_path(profile)
    url = f"{read_profile(path).admin_url}/"
    print(url)
    say(f"sign in with the token in {path}")
    if open_:
        typer.launch(url)
