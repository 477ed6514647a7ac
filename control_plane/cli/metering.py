"""`ingle usage`, `ingle cost`, `ingle price …`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from control_plane.cli import options
from control_plane.cli.output import say, show_list, show_one
from control_plane.errors import InvalidInput
from control_plane.metering.prices import NANO

price_app = typer.Typer(no_args_is_help=True, help="The price book: what tokens and accelerators cost.")

EndpointFilter = Annotated[str | None, typer.Option("--endpoint", help="Only this endpoint's.")]
_LINE_COLUMNS = (
    "endpoint", "deleted_at", "replica", "rung", "since", "until", "hours", "price_per_hour", "price_version", "amount",
    "currency",
)  # fmt: skip
_DRIFT_COLUMNS = (
    "replica", "kind", "region", "we_say", "they_say", "amount", "currency", "since", "seen_at", "settled_at",
)  # fmt: skip


def usage(
    since: options.Since = None,
    until: options.Until = None,
    month: options.Month = None,
    tenant: options.TenantFilter = None,
    endpoint: EndpointFilter = None,
    by_hour: Annotated[bool, typer.Option("--by-hour", help="One line for each UTC hour.")] = False,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Requests and tokens by tenant, endpoint and region, in whole UTC hours."""
    with options.connect(profile) as client:
        by = "hour" if by_hour else None
        found = client.usage(**options.period(since, until, month), tenant=tenant, endpoint=endpoint, by=by)
        columns = ["tenant", "endpoint", "region", "requests", "prompt_tokens", "completion_tokens", "cached_tokens"]
        columns += ["wasted_tokens", "price", "mean_duration_ms", "mean_ttft_ms"]
        show_list(found, ["hour", *columns] if by_hour else columns, output)


def cost(
    since: options.Since = None,
    until: options.Until = None,
    month: options.Month = None,
    tenant: options.TenantFilter = None,
    endpoint: EndpointFilter = None,
    by_replica: Annotated[
        bool, typer.Option("--by-replica", help="Each cent: one line for each replica, rung and price book.")
    ] = False,
    drift: Annotated[
        bool, typer.Option("--drift", help="Where providers' inventories and our records disagree, or did.")
    ] = False,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """What endpoints cost, deleted ones too: replica hours, the idle ones among them, and what tokens brought."""
    with options.connect(profile) as client:
        if drift:
            show_list(client.drift(), _DRIFT_COLUMNS, output)
            return
        if by_replica:
            lines = client.cost_lines(**options.period(since, until, month), tenant=tenant, endpoint=endpoint)
            lines.sort(key=lambda line: (line.endpoint, line.endpoint_id, line.since, line.replica))
            show_list(lines, _LINE_COLUMNS, output)
            _say_total((line.currency, line.amount) for line in lines)
            return
        found = client.cost(**options.period(since, until, month), tenant=tenant, endpoint=endpoint)
        columns = (
            "endpoint",
            "deleted_at",
            "accelerator",
            "replica_hours",
            "idle_hours",
            "replicas_cost",
            "warmth_cost",
        )
        show_list(found, (*columns, "requests", "tokens", "tokens_price", "currency"), output)
        _say_total((one.currency, one.replicas_cost) for one in found)


def _say_total(amounts: Iterable[tuple[str, float]]) -> None:
    """What replicas cost in all, by currency, to the billionth."""
    totals: dict[str, int] = {}
    for currency, amount in amounts:
        totals[currency] = totals.get(currency, 0) + round(amount * NANO)
    for currency, total in sorted(totals.items()):
        say(f"replicas cost {total / NANO:.9f} {currency} in all")


@price_app.command("list")
def list_prices(output: options.Output = options.Format.TABLE, profile: options.ProfileFile = None) -> None:
    """All versions of the price book, newest first."""
    with options.connect(profile) as client:
        show_list(client.prices(), ("version", "effective_at", "currency", "models", "accelerators"), output)


@price_app.command("set")
def set_prices(
    file: Annotated[Path, typer.Argument(help="YAML or JSON: currency, models, accelerators.")],
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Put the next version in force, from now on; what was metered before keeps its price."""
    import yaml

    try:
        book = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"{file} can't be read: {error}") from None
    if not isinstance(book, dict):
        raise InvalidInput(f"{file} must hold currency, models and accelerators")
    with options.connect(profile) as client:
        show_one(client.set_prices(book), output)
