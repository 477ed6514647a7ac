"""`ingle alert …`: what fires, what may fire, and for a while nobody is told."""

from __future__ import annotations

from typing import Annotated

import typer

from control_plane.cli import options
from control_plane.cli.output import show_list, show_one
from control_plane.errors import InvalidInput

app = typer.Typer(no_args_is_help=True, help="Alerts of the controller's own watch, and silences.")

_SILENCE = ("id", "matchers", "comment", "created_by", "ends_at")
_DAY = 86_400.0


@app.command("list")
def list_alerts(
    state: Annotated[str | None, typer.Option("--state", help="pending, firing or resolved.")] = None,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """What fires, and what is about to."""
    with options.connect(profile) as client:
        show_list(
            client.alerts(state), ("name", "severity", "state", "summary", "since", "silenced", "runbook"), output
        )


@app.command()
def rules(output: options.Output = options.Format.TABLE, profile: options.ProfileFile = None) -> None:
    """All alerts that there are, with their expressions in PromQL."""
    with options.connect(profile) as client:
        show_list(client.alert_rules(), ("name", "severity", "for_seconds", "summary", "runbook"), output)


@app.command()
def silence(
    matchers: Annotated[
        list[str], typer.Argument(help="NAME=VALUE, all of which must be so: alert=KvCacheExhausted endpoint=chat.")
    ],
    lasting: Annotated[
        float, typer.Option("--for", parser=options.duration, metavar="DURATION", help="How long from now.")
    ] = _DAY,
    comment: Annotated[str, typer.Option("--comment", help="Why.")] = "",
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Tell nobody of some alerts for a while. They are still listed."""
    wanted = {}
    for text in matchers:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise InvalidInput(f"{text!r} isn't NAME=VALUE: write alert=KvCacheExhausted or endpoint=chat")
        wanted[name] = value
    with options.connect(profile) as client:
        show_one(client.silence(wanted, lasting, comment), output)


@app.command()
def silences(output: options.Output = options.Format.TABLE, profile: options.ProfileFile = None) -> None:
    """Silences in force."""
    with options.connect(profile) as client:
        show_list(client.silences(), _SILENCE, output)


@app.command()
def unsilence(
    silence_id: Annotated[str, typer.Argument(help="Its id, from `ingle alert silences`.")],
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """End a silence now."""
    with options.connect(profile) as client:
        show_one(client.end_silence(silence_id), output)
