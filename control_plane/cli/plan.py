"""`ingle plan`: what traffic would take and cost, what fits where, and the accelerators that are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel

from control_plane.cli import options
from control_plane.cli.output import say, show_list
from control_plane.domain import RESTING_RUNGS, Rung
from control_plane.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from control_plane.metering.prices import PriceBook
    from control_plane.planning.accelerators import Catalogue
    from control_plane.planning.fit import Fit, Machine
    from control_plane.planning.forecast import Offer
    from control_plane.planning.shapes import Shape
    from control_plane.planning.traffic import Traffic

app = typer.Typer(help="What traffic would take and cost, before anything is started.")
_CONTEXT = 8192
_OFFERED = 3
"""Accelerators that are tried where none is named."""

Model = Annotated[str | None, typer.Option("--model", "-m", help="A model that the table of shapes knows.")]
ShapeFile = Annotated[Path | None, typer.Option("--shape", help="What `ingle model inspect -o json` printed.")]
Names = Annotated[list[str] | None, typer.Option("--accelerator", "-a", metavar="TYPE", help="May be repeated.")]
Count = Annotated[int, typer.Option("--count", min=1, max=64, help="Accelerators of each replica.")]
Context = Annotated[
    int | None,
    typer.Option("--context", min=1, help=f"Tokens of a sequence. [default: the model's, at most {_CONTEXT}]"),
]
PrecisionName = Annotated[str | None, typer.Option("--precision", help="As the engine takes it. [default: by device]")]
PresetName = Annotated[str | None, typer.Option("--preset", help="chat, throughput or edge: bounds of the engine.")]
PrefillShare = Annotated[
    float | None, typer.Option("--prefill-efficiency", min=0.01, max=1, help="Of the matrix rate, instead of ours.")
]
BandwidthShare = Annotated[
    float | None, typer.Option("--bandwidth-efficiency", min=0.01, max=1, help="Of the bandwidth, instead of ours.")
]


class Listed(BaseModel):
    """An accelerator of the catalogue."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    bf16_tflops: float
    eight_bit_tflops: float
    price_per_hour: float | None
    counts: list[int]
    regions: list[str]
    source: str
    price_source: str | None
    price_note: str


class Fitting(BaseModel):
    """How a model stands on a machine. Speeds are a roofline's, `measured` where it was fitted to measurements."""

    accelerator: str
    fits: bool
    weights_gb: float
    kv_kb_per_token: float
    cache_tokens: int
    users: int
    ttft: float | None
    """Seconds, of a prompt of half the context on an idle replica; None, as are speeds, where it doesn't fit."""
    tokens_per_s: float | None
    """Of one stream, half the context in."""
    tokens_per_s_full: float | None
    """Of all streams together, with as many as fit."""
    price_per_hour: float | None
    measured: bool


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    model: Model = None,
    shape: ShapeFile = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="CSV or JSON lines: arrival_s, input_tokens, output_tokens.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second, the mean, instead of a trace.")
    ] = None,
    input_tokens: Annotated[int, typer.Option("--input", help="Mean prompt length of a profile.")] = 500,
    output_tokens: Annotated[int, typer.Option("--output-tokens", help="Mean reply length of a profile.")] = 200,
    day: Annotated[str, typer.Option("--day", help="How a profile's hours relate: flat, daily or office.")] = "daily",
    weekend: Annotated[float, typer.Option("--weekend", help="A profile's Saturdays and Sundays, beside 1.")] = 0.4,
    bursts: Annotated[float, typer.Option("--bursts", help="Bursts a day of a profile, of two minutes and 8 ×.")] = 0.0,
    days: Annotated[float, typer.Option("--days", help="Of a profile, from a Monday on.")] = 7.0,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same traffic.")] = 0,
    accelerator: Names = None,
    count: Count = 1,
    rung: Annotated[
        list[str] | None, typer.Option("--rung", help="cold, ember, asleep or hot; may be repeated. [default: all]")
    ] = None,
    ttft: Annotated[
        float, typer.Option("--ttft", parser=options.duration, metavar="DURATION", help="Bound on the first token.")
    ] = 5.0,
    attain: Annotated[
        float, typer.Option("--attain", min=0, max=1, help="Share of requests that must keep it.")
    ] = 0.99,
    target: Annotated[float, typer.Option("--target", min=0.1, help="Requests at once for each replica.")] = 16.0,
    min_replicas: Annotated[int, typer.Option("--min-replicas", min=0, max=64)] = 0,
    max_replicas: Annotated[int, typer.Option("--max-replicas", min=1, max=64)] = 64,
    idle_timeout: Annotated[
        float, typer.Option("--idle-timeout", parser=options.duration, metavar="DURATION", help="Sleeps after so long.")
    ] = 300.0,
    max_wait: Annotated[
        float, typer.Option("--max-wait", parser=options.duration, metavar="DURATION", help="Holds a request.")
    ] = 60.0,
    context_length: Context = None,
    precision: PrecisionName = None,
    preset: PresetName = None,
    prefill_efficiency: PrefillShare = None,
    bandwidth_efficiency: BandwidthShare = None,
    cold_start: Annotated[
        float | None, typer.Option("--cold-start", parser=options.duration, metavar="DURATION", help="As measured.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option("--prices", help="A price book, as for `ingle price set`; list prices otherwise.")
    ] = None,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Replay a trace, or a profile's traffic, on the real scaler: time to first token, replicas, hours and money.

    Each accelerator and each rung of warmth is a line. Costs are of the accelerators alone.
    """
    if context.invoked_subcommand is not None:
        return
    from control_plane.planning.accelerators import catalogue
    from control_plane.planning.forecast import cheapest, forecast
    from control_plane.planning.scaler import endpoint

    try:
        rungs = [Rung(one) for one in rung or list(Rung)]
    except ValueError:
        raise InvalidInput(f"rung must be one of {', '.join(Rung)}", param="rung") from None
    traffic = _traffic(trace, rate, input_tokens, output_tokens, day, weekend, bursts, days, seed)
    known = _tuned(catalogue(), prefill_efficiency, bandwidth_efficiency, cold_start)
    fits = _fits(known, _shape(model, shape), accelerator, count, precision, context_length, preset)
    book = _book(known, prices)
    offers = _offers(known, fits, book, everything=accelerator is not None)
    what = endpoint(
        min_replicas=min_replicas, max_replicas=max(min_replicas, max_replicas), idle_timeout=idle_timeout,
        max_wait=max_wait, target=target,
    )  # fmt: skip
    say(f"{len(traffic):,} requests over {traffic.seconds / 3600:g} h; first token within {ttft:g} s")
    found = list(forecast(traffic, offers, rungs, what, ttft))
    columns = ("accelerator", "rung", "start_seconds", "within", "ttft_p50", "ttft_p95", "starts", "wakes",
               "most_replicas", "accelerator_hours", "idle_hours", "cost", "cost_per_month")  # fmt: skip
    show_list(found, columns, output)
    _assumptions(known, offers, book)
    best = cheapest(found, attain)
    if best is None:
        say(f"none keeps the bound for {attain:.3g} of the requests and has a price")
    else:
        say(f"cheapest that does, for {attain:.3g}: {best.accelerator} {best.rung}, {best.cost_per_month} a month")


@app.command("accelerators")
def accelerators(output: options.Output = options.Format.TABLE) -> None:
    """What is known of each accelerator, and where it was read. Prices are list prices in USD."""
    from control_plane.planning.accelerators import catalogue

    counts: dict[str, list[int]] = {}
    for one, several in catalogue().sizes():
        counts.setdefault(one.name, []).append(several)
    rows = [
        Listed(counts=counts[one.name], **one.model_dump(include=set(Listed.model_fields) - {"counts"}))
        for one in catalogue().accelerator
    ]
    columns = ("name", "memory_gb", "bandwidth_gb_s", "bf16_tflops", "eight_bit_tflops", "price_per_hour", "price_note")
    show_list(rows, (*columns, "counts"), output)


@app.command("fit")
def fit_(
    model: Model = None,
    shape: ShapeFile = None,
    accelerator: Names = None,
    count: Annotated[int | None, typer.Option("--count", min=1, max=64, help="[default: all of the catalogue]")] = None,
    context_length: Context = None,
    precision: PrecisionName = None,
    preset: PresetName = None,
    prefill_efficiency: PrefillShare = None,
    bandwidth_efficiency: BandwidthShare = None,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Where a model fits, for how many at once, and how fast it would be."""
    from control_plane.planning.accelerators import GIGA, catalogue

    known = _tuned(catalogue(), prefill_efficiency, bandwidth_efficiency, None)
    rows = []
    for one in _fits(known, _shape(model, shape), accelerator, count, precision, context_length, preset):
        half = max(1, one.context // 2)
        price = one.machine.accelerator.price_per_hour
        rows.append(
            Fitting(
                accelerator=one.machine.name,
                fits=one.fits,
                weights_gb=round(one.weights / GIGA, 2),
                kv_kb_per_token=round(one.kv_per_token / 1000, 1),
                cache_tokens=one.kv_tokens,
                users=one.users,
                ttft=round(one.prefill_seconds(half), 3) if one.fits else None,
                tokens_per_s=round(one.tokens_per_second(1, half), 1) if one.fits else None,
                tokens_per_s_full=round(one.tokens_per_second(one.slots(half), half), 1) if one.fits else None,
                price_per_hour=None if price is None else round(price * one.machine.count, 3),
                measured=one.machine.efficiency.measured,
            )
        )
    show_list(rows, tuple(Fitting.model_fields), output)
    for kind in sorted({"cpu" if one.measured else "gpu" for one in rows}):
        say(f"speeds on a {kind}: {known.efficiency[kind].note}")


def _traffic(
    trace: Path | None, rate: float | None, inputs: int, outputs: int, day: str, weekend: float, bursts: float,
    days: float, seed: int,
) -> Traffic:  # fmt: skip
    from control_plane.planning.traffic import SHAPES, Profile, generate, read_trace

    if (trace is None) == (rate is None):
        raise InvalidInput("give --trace or --rate, and not both", param="trace")
    if trace is not None:
        return read_trace(trace)
    if day not in SHAPES:
        raise InvalidInput(f"day must be one of {', '.join(SHAPES)}, not {day!r}", param="day")
    assert rate is not None  # noqa: S101 -- one of the two was given
    return generate(Profile(rate, inputs, outputs, SHAPES[day], weekend, bursts_per_day=bursts), days, seed)


def _shape(model: str | None, file: Path | None) -> Shape:
    from control_plane.planning.shapes import known_shape, known_shapes, parse_shape

    if (model is None) == (file is None):
        raise InvalidInput("give --model or --shape, and not both", param="model")
    if file is not None:
        try:
            return parse_shape(file.read_text("utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{file} can't be read: {error}", param="shape") from None
    found = known_shape(model or "")
    if found is None:
        names = ", ".join(name for name in known_shapes() if "/" not in name)
        raise InvalidInput(
            f"the shape of {model!r} isn't known: say --shape with what `ingle model inspect -o json` prints, or name "
            f"one of {names}",
            param="model",
        )
    return found


def _tuned(known: Catalogue, prefill: float | None, bandwidth: float | None, cold: float | None) -> Catalogue:
    """The catalogue with what was given on the command line in place of what it assumes."""
    given = {name: value for name, value in (("prefill", prefill), ("bandwidth", bandwidth)) if value is not None}
    efficiency = {
        kind: one.model_copy(update={**given, "note": f"as given: {given}"} if given else {})
        for kind, one in known.efficiency.items()
    }
    starts = known.starts
    if cold is not None:
        starts = {kind: one.model_copy(update={"cold_s": cold}) for kind, one in starts.items()}
    return known.model_copy(update={"efficiency": efficiency, "starts": starts})


def _fits(
    known: Catalogue, shape: Shape, names: Sequence[str] | None, count: int | None, precision: str | None,
    context: int | None, preset: str | None,
) -> list[Fit]:  # fmt: skip
    """How the model stands on each machine that was asked for. Raises InvalidInput naming the field."""
    from control_plane.planning.fit import fit, machines, precision_for

    for name in names or ():
        if known.find(name) is None:
            raise InvalidInput(
                f"{name!r} isn't one of {', '.join(one.name for one in known.accelerator)}", param="accelerator"
            )
    wanted = None if names is None else {known.find(name) for name in names}
    length = min(shape.max_model_len, _CONTEXT) if context is None else context
    found = []
    for machine in machines(known, None if count is None else {count, 1}):
        cpu = machine.accelerator.kind == "cpu"
        if (wanted is not None and machine.accelerator not in wanted) or (
            count not in (None, machine.count) and not cpu
        ):
            continue
        if wanted is None and cpu and precision not in (None, "auto", "packed"):
            continue
        if wanted is None and not cpu and precision == "packed":
            continue
        found.append(fit(shape, precision_for(machine.accelerator.kind, precision), length, _bounded(machine, preset)))
    return found


def _bounded(machine: Machine, preset: str | None) -> Machine:
    from control_plane.planning.presets import Preset, number, resolve

    if preset is None:
        return machine
    if preset not in list(Preset):
        raise InvalidInput(f"preset must be one of {', '.join(Preset)}, not {preset!r}", param="preset")
    settings = resolve(preset, ())
    most = number(settings, "--max-num-seqs") or machine.max_seqs
    return replace(machine, max_seqs=most, kv_tokens=number(settings, "--kv-cache-tokens"))


def _book(known: Catalogue, file: Path | None) -> PriceBook:
    """A file's price book, by the catalogue's names; list prices without one. Raises InvalidInput naming the field."""
    from control_plane.metering.prices import PriceBook

    if file is None:
        listed = {one.name: one.price_per_hour for one in known.accelerator if one.price_per_hour is not None}
        return PriceBook(0, 0.0, "USD", {}, listed)
    import yaml

    try:
        book = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"{file} can't be read: {error}", param="prices") from None
    found = book.get("accelerators") if isinstance(book, dict) else None
    if not isinstance(found, dict):
        raise InvalidInput(f"{file} must hold accelerators", param="prices")
    prices: dict[str, float] = {}
    for name, price in found.items():
        if not isinstance(price, int | float) or isinstance(price, bool) or not 0 <= price <= 1e6:
            raise InvalidInput(f"{file}: accelerators.{name} must be a price, not {price!r}", param="prices")
        kind, slash, rung = str(name).partition("/")
        if slash and rung not in list(Rung):
            raise InvalidInput(f"{file}: accelerators.{name}: {rung!r} isn't one of {', '.join(Rung)}", param="prices")
        accelerator = known.find(kind)
        prices[f"{accelerator.name if accelerator else kind}{slash}{rung}"] = float(price)
    return PriceBook(0, 0.0, str(book.get("currency") or "USD"), {}, prices)


def _offers(known: Catalogue, fits: Sequence[Fit], book: PriceBook, *, everything: bool) -> list[Offer]:
    """Each fit with its price; where no accelerator was named, the cheapest of those that fit and have one."""
    from control_plane.metering.prices import ANY
    from control_plane.planning.forecast import Offer
    from control_plane.warmth import price_per_hour

    offers = []
    for one in fits:
        accelerator = one.machine.accelerator
        price: float | None = None
        resting: dict[Rung, float | None] = dict.fromkeys(sorted(RESTING_RUNGS))
        if not book.accelerators.keys().isdisjoint((accelerator.name, ANY)):
            price = price_per_hour(book, accelerator.name, one.machine.count, Rung.HOT)
            resting = {rung: price_per_hour(book, accelerator.name, one.machine.count, rung) for rung in resting}
        if one.fits or everything:
            offers.append(Offer(one, price, known.starts[accelerator.kind], resting))
    if not everything:
        offers = [offer for offer in offers if offer.price_per_hour is not None]
        offers = sorted(offers, key=lambda offer: offer.price_per_hour or 0.0)[:_OFFERED]
    if not offers:
        raise InvalidInput("the model fits no accelerator with a price: name one, or more of them with --count")
    return offers


def _assumptions(known: Catalogue, offers: Sequence[Offer], book: PriceBook) -> None:
    from control_plane.metering.prices import ANY
    from control_plane.warmth import SHARES

    for kind in sorted({offer.fit.machine.accelerator.kind for offer in offers}):
        say(f"speeds on a {kind}: {known.efficiency[kind].note}")
    say("assumed: times of starts, unless --cold-start says")
    names = {offer.fit.machine.accelerator.name for offer in offers}
    shares = [
        f"{rung} {SHARES[rung]:.0%}"
        for rung in Rung
        if rung in RESTING_RUNGS
        and any(book.accelerators.keys().isdisjoint((f"{name}/{rung}", f"{ANY}/{rung}")) for name in names)
    ]
    if shares:
        told = ", ".join(shares)
        say(f"assumed: what rests costs a share of its accelerator, where the price book doesn't say: {told}")
