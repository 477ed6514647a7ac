"""`ingle tenant …` and `ingle key …`"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane.cli import options
from control_plane.cli.output import say, show_list, show_one

if TYPE_CHECKING:
    from control_plane.api.schemas import NewKey
    from control_plane.client import AdminClient

tenant_app = typer.Typer(no_args_is_help=True, help="Tenants: who endpoints and keys belong to.")
key_app = typer.Typer(no_args_is_help=True, help="API keys.")

KeyOutput = Annotated[options.KeyFormat, typer.Option("-o", "--output", help="env prints exports for an SDK.")]
KeyRegion = Annotated[str | None, typer.Option("--region", "-r", help="Whose gateway -o env names.")]
KeyId = Annotated[str, typer.Argument(help="The key's id: `ingle key list` shows it.")]


@tenant_app.command("create")
def create_tenant(
    name: Annotated[str, typer.Argument(help="A DNS label.")],
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Create a tenant."""
    with options.connect(profile) as client:
        show_one(client.create_tenant(name), output)


@tenant_app.command("list")
def list_tenants(output: options.Output = options.Format.TABLE, profile: options.ProfileFile = None) -> None:
    """List tenants."""
    with options.connect(profile) as client:
        show_list(client.tenants(), ("name", "id", "created_at"), output)


@key_app.command("create")
def create_key(
    name: Annotated[str, typer.Option("--name", help="What it is for.")] = "default",
    tenant: options.TenantName = "default",
    expires: Annotated[
        float | None,
        typer.Option("--expires", parser=options.duration, metavar="DURATION", help="Ends after so long."),
    ] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", min=1, help="Requests open at once.")] = None,
    region: KeyRegion = None,
    output: KeyOutput = options.KeyFormat.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Create an API key. Its secret is shown this once."""
    spec: dict[str, object] = {"name": name, "tenant": tenant}
    if expires is not None:
        spec["expires_in"] = expires
    if concurrency is not None:
        spec["concurrency"] = concurrency
    with options.connect(profile) as client:
        if region is not None:
            client.region(region)
        _show_new(client, client.create_key(spec), region, output)


@key_app.command("list")
def list_keys(
    tenant: options.TenantFilter = None,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """List API keys."""
    with options.connect(profile) as client:
        show_list(client.keys(tenant), ("id", "name", "tenant", "state", "created_at", "expires_at"), output)


@key_app.command("rotate")
def rotate_key(
    key_id: KeyId,
    grace: Annotated[
        float, typer.Option("--grace", parser=options.duration, metavar="DURATION", help="The old one still works.")
    ] = 0.0,
    region: KeyRegion = None,
    yes: options.Yes = False,
    output: KeyOutput = options.KeyFormat.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Replace a key by a new one."""
    if grace == 0:
        options.confirm(f"Key {key_id} stops working at once. Rotate it?", yes)
    with options.connect(profile) as client:
        _show_new(client, client.rotate_key(key_id, grace), region, output)


@key_app.command("revoke")
def revoke_key(
    key_id: KeyId,
    yes: options.Yes = False,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """End a key at once."""
    options.confirm(f"Revoke key {key_id}?", yes)
    with options.connect(profile) as client:
        show_one(client.revoke_key(key_id), output)


def exports(base_url: str, secret: str, ca_file: str) -> str:
    """Shell lines that make an unmodified OpenAI SDK speak to this installation."""
    values = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": secret, "SSL_CERT_FILE": ca_file}
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())


def _show_new(client: AdminClient, key: NewKey, region: str | None, output: options.KeyFormat) -> None:
    if output is not options.KeyFormat.ENV:
        show_one(key, options.Format(output))
        return
    name = region or _likely_region(client, key.tenant)
    print(exports(f"{client.region(name).url}/v1", key.secret, client.status().ca_file))
    say(f"# key {key.id} for region {name}: its secret won't be shown again")


def _likely_region(client: AdminClient, tenant: str) -> str:
    """The region of the tenant's endpoints where they are all in one, else the first."""
    used = {endpoint.region for endpoint in client.endpoints(tenant=tenant)}
    return used.pop() if len(used) == 1 else client.regions()[0].name
