"""`ingle endpoint …`"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli import options
from control_plane.cli.output import say, show_list, show_one
from control_plane.cli.waiting import Goal, asleep, never, serving, settled, wait_for

if TYPE_CHECKING:
    from control_plane.api.schemas import Logs
    from control_plane.client import AdminClient

app = typer.Typer(no_args_is_help=True, help="Endpoints: create, watch, change, delete.")
REPLICA_COLUMNS = ("id", "state", "rung", "generation", "address", "startup_ms", "created_at")
RUNG_COLUMNS = ("rung", "chosen", "price_per_hour", "currency", "first_token_ms", "p95_ms", "measured", "phases")
COLUMNS = ("name", "region", "model", "state", "generation", "desired_replicas", "reason.message")
PATIENCE = 600.0
_LOOK_AGAIN = 0.7
_SOON, _LOOKS = 0.2, 10

Name = Annotated[str, typer.Argument(help="The endpoint's name.")]
Gpu = Annotated[str | None, typer.Option("--gpu", metavar="TYPE", help="Accelerator type; the region must offer it.")]
Min = Annotated[int | None, typer.Option("--min-replicas", help="Never fewer. [default: 0]", min=0)]
Max = Annotated[int | None, typer.Option("--max-replicas", help="Never more. [default: 1]", min=1)]
Idle = Annotated[
    float | None,
    typer.Option(
        "--idle-timeout", parser=options.duration, metavar="DURATION", help="Sleeps after so long. [default: 5m]"
    ),
]
MaxWait = Annotated[
    float | None,
    typer.Option("--max-wait", parser=options.duration, metavar="DURATION", help="Holds a request. [default: 60s]"),
]
Retention = Annotated[
    float | None,
    typer.Option("--retention", parser=options.duration, metavar="DURATION", help="Keeps events. [default: 90d]"),
]
Warmth = Annotated[
    str | None,
    typer.Option(
        "--warmth",
        help="Kept while nobody calls: cold, ember, asleep, hot, or auto, the cheapest that meets --max-wait. "
        "[a new one's default: cold; auto with --max-wait]",
    ),
]
Target = Annotated[
    float | None, typer.Option("--target", min=0.5, help="Requests at once that a replica should carry. [default: 16]")
]
Slo = Annotated[
    float | None,
    typer.Option(
        "--ttft-slo", parser=options.span_or_none, metavar="DURATION|none", help="First token of 95 in 100 requests."
    ),
]
ScheduleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        metavar="SPAN",
        help="A minimum for a part of the week, 'mon-fri 08:00-18:00 Europe/Berlin 2'; may be repeated; none for none.",
    ),
]
EngineArg = Annotated[
    list[str] | None, typer.Option("--engine-arg", metavar="ARG", help="Passed to the engine; may be repeated.")
]
Preset = Annotated[
    str | None, typer.Option("--preset", help="chat, throughput or edge; --engine-arg goes before what it sets.")
]


@app.command()
def create(
    name: Name,
    region: Annotated[str, typer.Option("--region", "-r", help="The only region that it ever runs in.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A model's name, path or address.")],
    gpu: Gpu = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="Accelerators of each replica.", min=0, max=64)] = None,
    min_replicas: Min = None,
    max_replicas: Max = None,
    idle_timeout: Idle = None,
    warmth: Warmth = None,
    max_wait: MaxWait = None,
    retention: Retention = None,
    target: Target = None,
    ttft_slo: Slo = None,
    schedule: ScheduleOption = None,
    spend_limit: options.SpendLimit = None,
    engine_arg: EngineArg = None,
    preset: Preset = None,
    rpm: options.RequestsPerMinute = None,
    tpm: options.TokensPerMinute = None,
    concurrency: options.Concurrency = None,
    budget: options.Budget = None,
    tenant: options.TenantName = "default",
    wait: options.Wait = False,
    timeout: options.Patience = PATIENCE,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Create an endpoint. It starts once to prove its model, and sleeps when nobody calls."""
    if warmth == "hot" and min_replicas is None:
        min_replicas = 1
    if min_replicas and max_replicas is None:
        max_replicas = min_replicas
    spec = _given(
        name=name,
        region=region,
        model=_model(model),
        tenant=tenant,
        gpu=gpu,
        gpus=1 if gpu and gpus is None else gpus,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        idle_timeout=idle_timeout,
        max_wait=max_wait,
        retention=retention,
        warmth=warmth,
        target=target,
        ttft_slo=ttft_slo or None,
        spend_limit=spend_limit or None,
        schedule=options.schedule(schedule),
        engine_args=engine_arg or None,
        preset=preset,
    ) | options.limits(rpm, tpm, concurrency, budget)
    with options.connect(profile) as client:
        endpoint = client.create_endpoint(spec)
        if wait:
            endpoint = wait_for(client, name, serving, timeout) or endpoint
        if endpoint.warmth_by_wait:
            say(f"warmth {_choice(client, name, wait)}")
            endpoint = client.endpoint(name)
        show_one(endpoint, output, skip=("replicas",))


def _choice(client: AdminClient, name: str, started: bool) -> str:
    """Which rung was chosen and why. What its first start tells is there a moment after that start."""
    chosen = [""]
    for _ in range(_LOOKS if started else 1):
        chosen = [event.message for event in client.events(name) if event.kind == "warmth"]
        if len(chosen) > 1:
            break
        time.sleep(_SOON)
    return chosen[-1] if chosen else ""


@app.command("list")
def list_(
    region: Annotated[str | None, typer.Option("--region", "-r", help="Only those in this region.")] = None,
    tenant: options.TenantFilter = None,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """List endpoints."""
    with options.connect(profile) as client:
        show_list(client.endpoints(region=region, tenant=tenant), COLUMNS, output)


@app.command()
def show(name: Name, output: options.Output = options.Format.TABLE, profile: options.ProfileFile = None) -> None:
    """Show an endpoint and its replicas."""
    with options.connect(profile) as client:
        endpoint = client.endpoint(name)
        show_one(endpoint, output, skip=("replicas",))
        if output is options.Format.TABLE and endpoint.replicas:
            print()
            show_list(endpoint.replicas, REPLICA_COLUMNS, output)
        if output is options.Format.TABLE:
            print()
            show_list(client.rungs(name), RUNG_COLUMNS, output)


@app.command()
def update(
    name: Name,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model's name, path or address.")] = None,
    gpu: Gpu = None,
    min_replicas: Min = None,
    max_replicas: Max = None,
    idle_timeout: Idle = None,
    warmth: Warmth = None,
    max_wait: MaxWait = None,
    retention: Retention = None,
    target: Target = None,
    ttft_slo: Slo = None,
    schedule: ScheduleOption = None,
    spend_limit: options.SpendLimit = None,
    engine_arg: EngineArg = None,
    preset: Preset = None,
    rpm: options.RequestsPerMinute = None,
    tpm: options.TokensPerMinute = None,
    concurrency: options.Concurrency = None,
    budget: options.Budget = None,
    canary: Annotated[
        int | None, typer.Option("--canary", min=1, max=99, help="Try the change on so many percent of requests.")
    ] = None,
    pause: Annotated[bool | None, typer.Option("--pause/--resume", help="Stop serving, or serve again.")] = None,
    if_generation: Annotated[int | None, typer.Option("--if-generation", help="Only if it still is that.")] = None,
    wait: options.Wait = False,
    timeout: options.Patience = PATIENCE,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Change an endpoint; replicas are replaced one generation by the next without a gap."""
    changes = _given(
        model=_model(model) if model else None,
        gpu=gpu,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        idle_timeout=idle_timeout,
        max_wait=max_wait,
        retention=retention,
        warmth=warmth,
        engine_args=engine_arg or None,
        preset=preset,
        canary=canary,
        target=target,
        schedule=options.schedule(schedule),
        paused=pause,
    ) | options.limits(rpm, tpm, concurrency, budget)
    if preset == "none":
        changes["preset"] = None
    if ttft_slo is not None:
        changes["ttft_slo"] = ttft_slo or None
    if spend_limit is not None:
        changes["spend_limit"] = spend_limit or None
    if not changes:
        raise typer.BadParameter("say what to change: see --help")
    with options.connect(profile) as client:
        endpoint = client.update_endpoint(name, changes, if_generation=if_generation)
        if wait:
            endpoint = wait_for(client, name, settled, timeout) or endpoint
        show_one(endpoint, output, skip=("replicas",))


@app.command()
def delete(
    name: Name,
    yes: options.Yes = False,
    wait: options.Wait = False,
    timeout: options.Patience = PATIENCE,
    profile: options.ProfileFile = None,
) -> None:
    """Delete an endpoint: what is in flight ends first."""
    options.confirm(f"Delete endpoint {name}?", yes)
    with options.connect(profile) as client:
        client.delete_endpoint(name)
        if wait:
            wait_for(client, name, never, timeout)
    say(f"{name} {'is deleted' if wait else 'is being deleted'}")


@app.command()
def wake(
    name: Name,
    wait: options.Wait = False,
    timeout: options.Patience = PATIENCE,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Start a replica now; one that was given up on is tried again."""
    with options.connect(profile) as client:
        endpoint = client.wake_endpoint(name)
        finish(client, endpoint, serving, wait, timeout, output)


@app.command()
def sleep(
    name: Name,
    wait: options.Wait = False,
    timeout: options.Patience = PATIENCE,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Scale to zero now; the next request wakes it."""
    with options.connect(profile) as client:
        endpoint = client.sleep_endpoint(name)
        finish(client, endpoint, asleep, wait, timeout, output)


@app.command()
def events(
    name: Name,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new ones as they happen.")] = False,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """What happened to an endpoint, and why."""
    with options.connect(profile) as client:
        found = client.events(name, limit=limit)
        show_list(found, ("at", "kind", "state", "code", "message", "replica"), output)
        while follow:
            time.sleep(1.0)
            after = found[-1].id if found else 0
            new = client.events(name, limit=1000, after=after)
            if new:
                found = new
                for item in new:
                    print(f"{item.at}  {item.kind}  {item.state}  {item.code or '–'}  {item.message}", flush=True)


@app.command()
def logs(
    name: Name,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=5000, help="Of each replica.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new ones as they come, of all replicas.")
    ] = False,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """The last lines that an endpoint's replicas logged. What looks like a credential is taken out."""
    with options.connect(profile) as client:
        found, cursor = client.logs_since(name, None, lines=lines)
        if output is not options.Format.TABLE:
            if follow:
                raise typer.BadParameter("--follow prints lines: leave out --output")
            show_list(found, (), output)
            return
        last = _print_logs(found, "", follow)
        if not found and not follow:
            say("no replica of it has run yet")
        while follow:
            time.sleep(_LOOK_AGAIN)
            found, cursor = client.logs_since(name, cursor, lines=5000)
            last = _print_logs(found, last, follow)


def _print_logs(found: Sequence[Logs], last: str, always: bool) -> str:
    """Lines on stdout; on stderr whose they are, where that changes. Returns whose the last ones were."""
    for replica in found:
        if replica.replica != last and (replica.lines or not always):
            say(f"{replica.replica} ({replica.state})")
            last = replica.replica
        for line in replica.lines:
            print(line, flush=True)
    return last


@app.command("test")
def try_(
    name: Name,
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask.")] = "Say hello in five words.",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 32,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Stream one reply through the gateway, with a key made for it and revoked after it."""
    from control_plane.cli.probe import try_endpoint

    with options.connect(profile) as client:
        result = try_endpoint(client, name, prompt, max_tokens)
    show_one(result, output)


def finish(client: Any, endpoint: Any, goal: Goal, wait: bool, timeout: float, output: options.Format) -> None:
    if wait:
        endpoint = wait_for(client, endpoint.name, goal, timeout) or endpoint
    elif not goal(endpoint):
        say(f"{endpoint.name} is {endpoint.state} for now: --wait waits until that is done")
    show_one(endpoint, output, skip=("replicas",))


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _model(text: str) -> str:
    """A path that is there, made absolute: the platform runs in a folder of its own."""
    return os.path.abspath(text) if os.path.exists(text) else text
