"""`ingle up`, `ingle serve …`, `ingle db …`: the commands that run the platform itself."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli import options
from control_plane.cli.account import exports
from control_plane.cli.output import say, show_one
from control_plane.errors import ConfigError

if TYPE_CHECKING:
    from control_plane.app import Role, Running
    from control_plane.config import Settings

serve_app = typer.Typer(no_args_is_help=True, help="Run one role, for production.")
db_app = typer.Typer(no_args_is_help=True, help="The database's schema.")
keyring_app = typer.Typer(no_args_is_help=True, help="What secrets at rest are sealed by.")
DEMO_ENDPOINT = "smollm2"
DEMO_MODEL = "smollm2-135m-instruct"


def up(
    home: options.Home = None,
    gateway: options.GatewayAddress = None,
    admin: options.Admin = None,
    demo: Annotated[bool, typer.Option("--demo", help="Also create an endpoint on a small real model.")] = False,
    keep_replicas: Annotated[bool, typer.Option("--keep-replicas", help="Leave replicas running on stop.")] = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Run everything in this process: admin API, controller and every region's gateway."""
    settings = local_settings(home, gateway=gateway, admin=admin)
    from control_plane.app import Role, only_one, serve
    from control_plane.bootstrap import bootstrap

    async def ready(running: Running) -> None:
        key = await bootstrap(running.platform, running.admin_url or "", first_key=not demo)
        facts: dict[str, Any] = {
            "event": "ready",
            "admin": running.admin_url,
            "gateways": running.gateway_urls,
            "ca_file": str(running.platform.authority.ca_file),
            "profile": str(settings.home / "profile.toml"),
            "key": key,
        }
        if demo:
            await asyncio.to_thread(_make_demo, settings)
            facts["key"] = await asyncio.to_thread(_demo_key, settings)
            facts["endpoint"] = DEMO_ENDPOINT
        print(json.dumps(facts) if output is options.Format.JSON else _greeting(facts), flush=True)

    with only_one(settings.home):
        _run(
            serve(
                settings,
                list(Role),
                regions=[region.name for region in settings.regions],
                ready=ready,
                migrate=True,
                end_replicas=not keep_replicas,
            )
        )


@serve_app.command("api")
def serve_api(home: options.Home = None, admin: options.Admin = None) -> None:
    """The admin API."""
    from control_plane.app import Role
    from control_plane.bootstrap import bootstrap

    settings = local_settings(home, admin=admin)

    async def ready(running: Running) -> None:
        await bootstrap(running.platform, running.admin_url or "", first_key=False)
        print(json.dumps({"event": "ready", "role": "api", "admin": running.admin_url}), flush=True)

    _serve(settings, Role.API, [], ready)


@serve_app.command("gateway")
def serve_gateway(
    region: Annotated[list[str] | None, typer.Option("--region", "-r", help="Whose; all where none is named.")] = None,
    home: options.Home = None,
    gateway: options.GatewayAddress = None,
) -> None:
    """Gateways, one listener a region."""
    from control_plane.app import Role

    settings = local_settings(home, gateway=gateway)
    names = region or [item.name for item in settings.regions]
    for name in names:
        settings.gateway_address(name)

    async def ready(running: Running) -> None:
        print(json.dumps({"event": "ready", "role": "gateway", "gateways": running.gateway_urls}), flush=True)

    _serve(settings, Role.GATEWAY, names, ready)


@serve_app.command("controller")
def serve_controller(home: options.Home = None) -> None:
    """The reconciler and the autoscaler."""
    from control_plane.app import Role

    async def ready(running: Running) -> None:
        print(json.dumps({"event": "ready", "role": "controller"}), flush=True)

    _serve(local_settings(home), Role.CONTROLLER, [], ready)


@db_app.command("upgrade")
def upgrade(home: options.Home = None, output: options.Output = options.Format.TABLE) -> None:
    """Bring the database to this version's schema."""
    from control_plane.store.schema import upgrade_schema

    settings = _prepared(home)
    status = upgrade_schema(settings.store_url)
    _show_schema(status.current, status.head, True, output)


@db_app.command("check")
def check(home: options.Home = None, output: options.Output = options.Format.TABLE) -> None:
    """Whether the database has this version's schema; exits 1 where it hasn't."""
    from control_plane.store.schema import schema_status

    settings = _prepared(home)
    status = schema_status(settings.store_url)
    _show_schema(status.current, status.head, status.up_to_date, output)
    if not status.up_to_date:
        say("ingle: run `ingle db upgrade`" if status.known else "ingle: a newer version of ingle wrote this database")
        raise typer.Exit(1)


@keyring_app.command("rotate")
def rotate_keyring(home: options.Home = None, output: options.Output = options.Format.TABLE) -> None:
    """Take a new key-encryption key and seal this home's secrets again by it. Nothing has to be stopped for that."""
    from pydantic import BaseModel

    from control_plane.app import keyring_of
    from control_plane.observe.logs import event
    from control_plane.security.keyring import rotate_keyring as rotate

    class Rotated(BaseModel):
        key: str
        files: int

    settings = _prepared(home)
    key, files = rotate(settings.home, keyring_of(settings))
    event("keyring.rotated", key=key, files=files)
    show_one(Rotated(key=key, files=files), output)
    if settings.keyring.kms_key is None:
        say("ingle: make a copy of the keyring; backups of before open by the copy from before")


def _show_schema(current: str | None, head: str | None, fine: bool, output: options.Format) -> None:
    from pydantic import BaseModel

    class Schema(BaseModel):
        current: str | None
        head: str | None
        up_to_date: bool

    show_one(Schema(current=current, head=head, up_to_date=fine), output)


def local_settings(home: Path | None, keyring: Path | None = None, **given: str | None) -> Settings:
    """Of the installation at `home`, for what works on it right here."""
    from control_plane.config import load_settings
    from control_plane.observe.logs import set_up_logs

    os.umask(0o077)  # what an installation writes is its owner's alone
    keys = None if keyring is None else {"file": keyring}
    settings = load_settings({"home": home, "keyring": keys, **given})
    set_up_logs(settings.log_level)
    return settings


def _prepared(home: Path | None) -> Settings:
    settings = local_settings(home)
    try:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{settings.home} can't be used ({error.strerror}): choose a writable --home", param="home"
        ) from None
    return settings


def _serve(settings: Settings, role: Role, regions: list[str], ready: Any) -> None:
    from control_plane.app import serve

    _run(serve(settings, [role], regions=regions, ready=ready))


def _run(work: Any) -> None:
    import uvloop

    uvloop.run(work)


def _make_demo(settings: Settings) -> None:
    from control_plane.errors import NotFound

    with options.connect(settings.home / "profile.toml") as client:
        try:
            client.endpoint(DEMO_ENDPOINT)
        except NotFound:
            region = settings.regions[0].name
            client.create_endpoint({"name": DEMO_ENDPOINT, "region": region, "model": DEMO_MODEL})


def _demo_key(settings: Settings) -> str:
    with options.connect(settings.home / "profile.toml") as client:
        return client.create_key({"name": "demo"}).secret


def _greeting(facts: dict[str, Any]) -> str:
    lines = [f"gateway  {url}/v1  ({region})" for region, url in facts["gateways"].items()]
    lines += [
        f"admin    {facts['admin']}",
        f"page     {facts['admin']}/  (sign in with the token in the profile)",
        f"CA file  {facts['ca_file']}",
        f"profile  {facts['profile']}",
    ]
    url = f"{next(iter(facts['gateways'].values()))}/v1"
    if facts["key"] is None:
        return "\n".join(lines)
    lines += ["", exports(url, facts["key"], facts["ca_file"])]
    if "endpoint" in facts:
        body = {"model": facts["endpoint"], "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
        lines += [
            "",
            f"curl --cacert {facts['ca_file']} -N {url}/chat/completions "
            f"-H 'Authorization: Bearer {facts['key']}' -H 'Content-Type: application/json' "
            f"-d '{json.dumps(body)}'",
        ]
    return "\n".join(lines)
