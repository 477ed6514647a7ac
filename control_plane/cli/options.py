"""Options that many commands share, and values as people write them."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane import spans
from control_plane.errors import InvalidInput

if TYPE_CHECKING:
    from control_plane.client import AdminClient


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class KeyFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    ENV = "env"


def duration(text: str | float) -> float:
    """`90`, `90s`, `5m`, `2h`, `30d` → seconds. Defaults come here too, as numbers."""
    try:
        return spans.duration(text)
    except spans.SpanError as error:
        raise typer.BadParameter(str(error)) from None


def span_or_none(text: str | float) -> float:
    """A duration, or `none`, which becomes 0."""
    return 0.0 if str(text).strip().lower() == "none" else duration(text)


def schedule(texts: list[str] | None) -> list[dict[str, Any]] | None:
    """Parts of the week; `none` alone is an empty schedule."""
    if not texts:
        return None
    try:
        return [] if texts == ["none"] else [spans.window(text) for text in texts]
    except spans.SpanError as error:
        raise typer.BadParameter(str(error)) from None


def moment(text: str) -> float:
    """A time, or how long ago it was."""
    try:
        return spans.moment(text, time.time())
    except spans.SpanError as error:
        raise typer.BadParameter(str(error)) from None


def period(since: float | None, until: float | None, month: str | None) -> dict[str, str | None]:
    """The period that was asked for, as the admin API takes it. Raises BadParameter for two at once, or no month."""
    if month is not None:
        if since is not None or until is not None:
            raise typer.BadParameter("--month, or --since and --until, not both")
        try:
            since, until = spans.month(month)
        except spans.SpanError as error:
            raise typer.BadParameter(str(error), param_hint="'--month'") from None
    return {name: None if at is None else str(at) for name, at in (("since", since), ("until", until))}


def limit(text: str | float) -> float:
    """A positive number, or `none`, which becomes 0."""
    if str(text).strip().lower() == "none":
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e15:
        raise typer.BadParameter(f"{text!r} isn't a limit: write a number above 0, or none")
    return value


def limits(rpm: float | None, tpm: float | None, concurrency: float | None, budget: float | None) -> dict[str, Any]:
    """The limits that were given, as the admin API takes them; `none` becomes null."""
    whole = {"requests_per_minute": rpm, "tokens_per_minute": tpm, "concurrency": concurrency}
    given: dict[str, Any] = {name: int(value) or None for name, value in whole.items() if value is not None}
    return given if budget is None else {**given, "monthly_budget": budget or None}


RequestsPerMinute = Annotated[
    float | None, typer.Option("--requests-per-minute", "--rpm", parser=limit, metavar="N|none", help="Shared by all.")
]
TokensPerMinute = Annotated[
    float | None, typer.Option("--tokens-per-minute", "--tpm", parser=limit, metavar="N|none", help="Prompt and reply.")
]
Concurrency = Annotated[
    float | None, typer.Option("--concurrency", parser=limit, metavar="N|none", help="Requests open at once.")
]
Budget = Annotated[
    float | None, typer.Option("--budget", parser=limit, metavar="AMOUNT|none", help="A month's, by the price book.")
]
SpendLimit = Annotated[
    float | None,
    typer.Option("--spend-limit", parser=limit, metavar="AMOUNT|none", help="What replicas may cost in a UTC month."),
]
Since = Annotated[
    float | None,
    typer.Option("--since", parser=moment, metavar="WHEN", help="From when: 30d (ago, the default) or 2026-11-01."),
]
Until = Annotated[float | None, typer.Option("--until", parser=moment, metavar="WHEN", help="Until when; now.")]
Month = Annotated[str | None, typer.Option("--month", metavar="YYYY-MM", help="A UTC month instead.")]
Output = Annotated[Format, typer.Option("-o", "--output", help="How to print.", envvar="INGLE_OUTPUT")]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", help="Profile file.", envvar="INGLE_PROFILE", show_envvar=True)
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is so.")]
Patience = Annotated[
    float, typer.Option("--timeout", parser=duration, metavar="DURATION", help="How long --wait waits.")
]
Home = Annotated[Path | None, typer.Option("--home", help="Where everything is kept.", envvar="INGLE_HOME")]
TenantName = Annotated[str, typer.Option("--tenant", help="Whose it is.")]
TenantFilter = Annotated[str | None, typer.Option("--tenant", help="Only this tenant's.")]
Admin = Annotated[str | None, typer.Option("--admin", metavar="HOST:PORT", help="Where the admin API listens.")]
GatewayAddress = Annotated[
    str | None,
    typer.Option("--gateway", metavar="HOST:PORT", help="Where the first region's gateway listens."),
]


def connect(profile: Path | None) -> AdminClient:
    """A client of the installation that the profile names."""
    from control_plane.client import AdminClient
    from control_plane.profile import profile_path, read_profile

    return AdminClient(read_profile(profile_path(profile)))


def confirm(question: str, yes: bool) -> None:
    """Ask, unless told not to. Raises InvalidInput where there is nobody to ask, and Abort on no."""
    import sys

    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"{question} Say --yes, since there is no terminal to ask at.")
    typer.confirm(question, abort=True, err=True)
