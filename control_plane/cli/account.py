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

_KEY_COLUMNS = ("id", "name", "tenant", "state", "created_at", "expires_at", "last_used_at")
KeyOutput = Annotated[options.KeyFormat, typer.Option("-o", "--output", help="env prints exports for an SDK.")]
KeyRegion = Annotated[str | None, typer.Option("--region", "-r", help="Whose gateway -o env names.")]
KeyEndpoints = Annotated[list[str] | None, typer.Option("--endpoint", help="Only this one; may be repeated.")]
KeyRoutes = Annotated[list[str] | None, typer.Option("--route", help="Only this path; may be repeated.")]
KeyNetworks = Annotated[list[str] | None, typer.Option("--network", help="Only from here, in CIDR; may be repeated.")]
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


@tenant_app.command("limits")
def limit_tenant(
    name: Annotated[str, typer.Argument(help="Whose limits.")],
    rpm: options.RequestsPerMinute = None,
    tpm: options.TokensPerMinute = None,
    concurrency: options.Concurrency = None,
    budget: options.Budget = None,
    spend_limit: options.SpendLimit = None,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Show a tenant's limits, after changing those that are given."""
    changes = options.limits(rpm, tpm, concurrency, budget)
    if spend_limit is not None:
        changes["spend_limit"] = spend_limit or None
    with options.connect(profile) as client:
        show_one(client.limit_tenant(name, changes) if changes else client.tenant(name), output)


@key_app.command("create")
def create_key(
    name: Annotated[str, typer.Option("--name", help="What it is for.")] = "default",
    tenant: options.TenantName = "default",
    expires: Annotated[
        float | None,
        typer.Option("--expires", parser=options.duration, metavar="DURATION", help="Ends after so long."),
    ] = None,
    rpm: options.RequestsPerMinute = None,
    tpm: options.TokensPerMinute = None,
    concurrency: options.Concurrency = None,
    budget: options.Budget = None,
    endpoint: KeyEndpoints = None,
    route: KeyRoutes = None,
    network: KeyNetworks = None,
    region: KeyRegion = None,
    output: KeyOutput = options.KeyFormat.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Create an API key. Its secret is shown this once."""
    spec: dict[str, object] = {"name": name, "tenant": tenant}
    if expires is not None:
        spec["expires_in"] = expires
    spec |= options.limits(rpm, tpm, concurrency, budget) | _scope(endpoint, route, network)
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
        show_list(client.keys(tenant), _KEY_COLUMNS, output)


@key_app.command("limits")
def limit_key(
    key_id: KeyId,
    rpm: options.RequestsPerMinute = None,
    tpm: options.TokensPerMinute = None,
    concurrency: options.Concurrency = None,
    budget: options.Budget = None,
    endpoint: KeyEndpoints = None,
    route: KeyRoutes = None,
    network: KeyNetworks = None,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Change what a key may use, and how much; what isn't named stays."""
    changes = options.limits(rpm, tpm, concurrency, budget) | _scope(endpoint, route, network)
    with options.connect(profile) as client:
        show_one(client.update_key(key_id, changes), output)


@key_app.command("rotate")
def rotate_key(
    key_id: KeyId,
    grace: Annotated[
        float,
        typer.Option("--grace", "--overlap", parser=options.duration, metavar="DURATION", help="The old one works on."),
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


def _scope(
    endpoints: list[str] | None, routes: list[str] | None, networks: list[str] | None
) -> dict[str, list[str] | None]:
    """The parts of a scope that were given; `none` lifts one."""
    given = {"endpoints": endpoints, "routes": routes, "networks": networks}
    return {part: None if values == ["none"] else values for part, values in given.items() if values}


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
