"""`ingle bench URL`: load for any OpenAI-compatible server, and what came of it."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane.cli import options
from control_plane.cli.output import say
from control_plane.errors import IngleError, InvalidInput

if TYPE_CHECKING:
    from control_plane.bench.driver import Target
    from control_plane.bench.report import Slo, Summary
    from control_plane.bench.workload import Workload

_MOST_OPEN = 4096


def bench(
    url: Annotated[str, typer.Argument(help="Base URL, ending in /v1.")],
    model: Annotated[str, typer.Option("--model", "-m", help="The model to ask for.")],
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", help="Requests at once; several, as 1,8,32, make a sweep.")
    ] = "1",
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests of each closed-loop run.")] = 32,
    rate: Annotated[
        str, typer.Option("--rate", help="Arrivals a second (Poisson) instead of --concurrency; may be a sweep.")
    ] = "",
    duration: Annotated[
        float, typer.Option(parser=options.duration, metavar="DURATION", help="Of each --rate run.")
    ] = 30.0,
    trace: Annotated[Path | None, typer.Option(help="Arrivals and lengths from JSON lines.")] = None,
    input_tokens: Annotated[str, typer.Option("--input", help="Prompt length: 128, 64-256 or 128~32.")] = "128",
    output_tokens: Annotated[str, typer.Option("--output-tokens", help="Reply length, likewise.")] = "128",
    shared_prefix: Annotated[int, typer.Option(min=0, help="Words that all prompts begin with.")] = 0,
    chat: Annotated[bool, typer.Option("--chat/--completions", help="Which route.")] = False,
    extra: Annotated[str, typer.Option(help="JSON merged into each body, such as '{\"ignore_eos\": true}'.")] = "{}",
    slo: Annotated[str, typer.Option(help="What counts as good, in seconds: ttft=0.5,tpot=0.05.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the clock starts.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the sweep, as HTML.")] = None,
    cacert: Annotated[Path | None, typer.Option(help="CA file.", envvar="SSL_CERT_FILE")] = None,
    api_key: Annotated[str, typer.Option(help="Key.", envvar="OPENAI_API_KEY", show_default=False)] = "",
    output: options.Output = options.Format.TABLE,
) -> None:
    """Measure a server that speaks OpenAI's API."""
    from control_plane.bench.driver import Target
    from control_plane.bench.report import Slo
    from control_plane.bench.report import plot as draw
    from control_plane.bench.workload import Lengths, Workload

    if not url.startswith(("http://", "https://")):
        raise InvalidInput(f"URL must begin with http:// or https://, not {url!r}")
    target = Target(url, model, api_key, chat, _trust(url, cacert), _object(extra))
    workload = Workload(
        Lengths.parse(input_tokens, "--input"),
        Lengths.parse(output_tokens, "--output-tokens"),
        shared_prefix,
        seed=seed,
    )
    bounds = Slo.parse(slo)
    summaries = asyncio.run(
        _run(target, workload, _numbers(concurrency, "--concurrency"), requests, _rates(rate), duration, trace, bounds,
             warmup)
    )  # fmt: skip
    if plot is not None:
        plot.write_text(draw(f"{model} at {url}", summaries), "utf-8")
        say(f"plot written to {plot}")
    _print(summaries, output)
    for summary in summaries:
        for reason, count in summary.error_kinds.items():
            say(f"{summary.label}: {count} requests failed: {reason}")
    if all(summary.errors == summary.requests for summary in summaries):
        raise IngleError(f"every request to {url} failed: {next(iter(summaries[0].error_kinds))}")


async def _run(
    target: Target,
    workload: Workload,
    levels: list[int],
    requests: int,
    rates: list[float],
    duration: float,
    trace: Path | None,
    slo: Slo,
    warmup: int,
) -> list[Summary]:
    from control_plane.bench.driver import Driver
    from control_plane.bench.report import summarize
    from control_plane.bench.workload import from_trace, poisson

    summaries: list[Summary] = []
    async with Driver(target, _MOST_OPEN) as driver:
        await _warm(driver.closed, workload, warmup)
        if trace is not None:
            say(f"replaying {trace} …")
            return [summarize(trace.name, await driver.open(from_trace(trace, workload)), slo)]
        # each run sends prompts of its own: a repeated one would find its prefix cached
        for place, rate in enumerate(rates):
            say(f"{rate:g} requests a second for {duration:g} s …")
            own = replace(workload, seed=workload.seed + place)
            outcomes = await driver.open(own.requests(poisson(rate, duration, own.seed)))
            summaries.append(summarize(f"{rate:g}/s", outcomes, slo))
        for place, level in enumerate([] if rates else levels):
            count = max(requests, level)
            say(f"{count} requests, {level} at once …")
            own = replace(workload, seed=workload.seed + place)
            outcomes = await driver.closed(own.requests(), count, level)
            summaries.append(summarize(f"{level} at once", outcomes, slo))
    return summaries


async def _warm(send: object, workload: Workload, count: int) -> None:
    if count and callable(send):
        other = replace(workload, seed=workload.seed + 1_000_003)
        await send(other.requests(), count, min(count, 8))


def _print(summaries: list[Summary], output: options.Format) -> None:
    from control_plane.bench.report import ROW, row

    if output is options.Format.TABLE:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, header_style="", pad_edge=False)
        for name in ROW:
            table.add_column(name, justify="left" if name == "load" else "right", no_wrap=True)
        for summary in summaries:
            table.add_row(*row(summary))
        Console(width=160 if not os.isatty(1) else None).print(table)
        print("times in milliseconds")
    elif output is options.Format.JSON:
        print(json.dumps([summary.as_dict() for summary in summaries], indent=2))
    else:
        import yaml

        print(yaml.safe_dump([summary.as_dict() for summary in summaries], sort_keys=False), end="")


def _numbers(text: str, name: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidInput(f"{name} must be numbers like 1,8,32, not {text!r}") from error
    if not all(1 <= level <= _MOST_OPEN for level in levels):
        raise InvalidInput(f"{name} must lie between 1 and {_MOST_OPEN}, not {text!r}")
    return levels


def _rates(text: str) -> list[float]:
    if not text:
        return []
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidInput(f"--rate must be numbers like 0.5,1,2, not {text!r}") from error
    if not all(0 < rate <= 10_000 for rate in rates):
        raise InvalidInput(f"--rate must lie above 0 and up to 10,000 a second, not {text!r}")
    return rates


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"--extra is not JSON: {text!r}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"--extra must be a JSON object, not {text!r}")
    return value


def _trust(url: str, cacert: Path | None) -> ssl.SSLContext | bool:
    if cacert is None or not url.startswith("https://"):
        return True
    try:
        return ssl.create_default_context(cafile=str(cacert))
    except OSError as error:
        raise InvalidInput(f"cannot read the CA file {cacert}: {error.strerror or error}") from error
