"""`ingle top`: how all endpoints are, live."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane.cli import options
from control_plane.cli.output import show_list

if TYPE_CHECKING:
    from rich.console import Group

    from control_plane.api.observed import Alert
    from control_plane.api.schemas import Live

_MOST_ALERTS = 8
_STATES = {"ready": "green", "failed": "red", "degraded": "red", "zero": "dim", "paused": "dim"}


def top(
    interval: Annotated[
        float, typer.Option("--interval", parser=options.duration, metavar="DURATION", help="Between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look, with the rates since one before it.")] = False,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """All endpoints, live: latency, throughput, what is held, replicas, cost, and the alerts that fire.

    With -o json, one array a look and line.
    """
    if interval < 1:
        raise typer.BadParameter("--interval must be 1s or more")
    with options.connect(profile) as client:
        client.live()  # rates are told from the second look on
        time.sleep(interval)
        if once and output is not options.Format.TABLE:
            show_list(client.live(), (), output)
            return
        if output is not options.Format.TABLE:
            while True:
                print(json.dumps([one.model_dump(mode="json") for one in client.live()]), flush=True)
                time.sleep(interval)
        from rich.console import Console
        from rich.live import Live as Screen

        console = Console(width=None if sys.stdout.isatty() else 200)
        frame = _frame(client.live(), client.alerts("firing"))
        if once:
            console.print(frame)
            return
        with Screen(frame, console=console, screen=console.is_terminal, auto_refresh=False) as screen:
            while True:
                screen.update(_frame(client.live(), client.alerts("firing")), refresh=True)
                time.sleep(interval)


def _frame(found: Sequence[Live], alerts: Sequence[Alert]) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for column in ("endpoint", "region", "state"):
        table.add_column(column, overflow="fold")
    for column in (
        "replicas",
        "in flight",
        "held",
        "waiting",
        "ttft p50",
        "p95",
        "per token",
        "tokens/s",
        "kv",
        "hits",
        "cost/h",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for one in sorted(found, key=lambda one: (-(one.tokens_per_s or 0.0), one.endpoint)):
        table.add_row(
            one.endpoint,
            one.region,
            Text(one.state, style=_STATES.get(one.state, "yellow")),
            f"{one.replicas}/{one.desired}",
            str(one.in_flight),
            str(one.held),
            str(one.waiting),
            _ms(one.ttft_p50),
            _ms(one.ttft_p95),
            _ms(one.tpot),
            "–" if one.tokens_per_s is None else f"{one.tokens_per_s:.0f}",
            _percent(one.kv_usage),
            _percent(one.hit_ratio),
            f"{one.cost_per_hour:.2f}",
        )
    tokens = sum(one.tokens_per_s or 0.0 for one in found)
    cost = sum(one.cost_per_hour for one in found)
    currency = found[0].currency if found else ""
    total = (
        f"{len(found)} endpoints · {tokens:.0f} tokens/s · {cost:.2f} {currency} an hour · {time.strftime('%H:%M:%S')}"
    )
    told = [Text(f"{alert.severity}: {alert.summary}", style="red" if alert.severity == "critical" else "yellow")
            for alert in alerts if not alert.silenced][:_MOST_ALERTS]  # fmt: skip
    return Group(Text(total, style="bold"), *told, table)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.0f} %"
