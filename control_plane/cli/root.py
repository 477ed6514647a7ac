"""The tree of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from control_plane.cli import (
    account,
    alert,
    backup,
    bench,
    dashboard,
    doctor,
    endpoint,
    engine,
    metering,
    plan,
    platform,
    rollout,
    run,
    spec,
    top,
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serverless endpoints for language models, pinned to a region.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("ingle"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("up")(run.up)
app.add_typer(run.serve_app, name="serve")
app.add_typer(run.db_app, name="db")
app.add_typer(run.keyring_app, name="keyring")
app.add_typer(backup.app, name="backup")
app.add_typer(platform.region_app, name="region")
rollout.add_to(endpoint.app)
spec.add_to(app)
app.add_typer(endpoint.app, name="endpoint")
app.add_typer(account.tenant_app, name="tenant")
app.add_typer(account.key_app, name="key")
app.add_typer(platform.cert_app, name="cert")
app.command("usage")(metering.usage)
app.command("cost")(metering.cost)
app.add_typer(metering.price_app, name="price")
app.add_typer(plan.app, name="plan")
app.add_typer(alert.app, name="alert")
app.add_typer(platform.audit_app, name="audit")
app.command("top")(top.top)
app.command("dashboard")(dashboard.dashboard)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("engine", context_settings=engine.PASS_ON)(engine.engine)
app.command("model", context_settings=engine.PASS_ON)(engine.model)
