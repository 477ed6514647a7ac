"""`ingle region …`, `ingle cert …`, `ingle audit …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from control_plane.cli import options
from control_plane.cli.output import say, show_list, show_one
from control_plane.errors import InvalidInput

region_app = typer.Typer(no_args_is_help=True, help="Regions: where endpoints live and where they answer.")
cert_app = typer.Typer(no_args_is_help=True, help="Certificates of the private authority.")
audit_app = typer.Typer(no_args_is_help=True, help="Who changed what.")
_REGION_COLUMNS = (
    "name", "jurisdiction", "provider", "reachable", "accelerators", "url", "gateway", "endpoints", "trouble",
)  # fmt: skip
_CERT_COLUMNS = ("name", "not_after", "days_left", "names", "serial")


@region_app.command("list")
def list_regions(output: options.Output = options.Format.TABLE, profile: options.ProfileFile = None) -> None:
    """List regions: whose law holds, what runs there, whether it is reachable now and which accelerators it offers."""
    with options.connect(profile) as client:
        show_list(client.regions(), _REGION_COLUMNS, output)


@region_app.command("show")
def show_region(
    name: Annotated[str, typer.Argument()],
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Show a region."""
    with options.connect(profile) as client:
        show_one(client.region(name), output)


@cert_app.command("list")
def list_certificates(output: options.Output = options.Format.TABLE, profile: options.ProfileFile = None) -> None:
    """List certificates."""
    with options.connect(profile) as client:
        show_list(client.certificates(), _CERT_COLUMNS, output)


@cert_app.command("show")
def show_certificate(
    name: Annotated[str, typer.Argument()],
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Show a certificate."""
    with options.connect(profile) as client:
        show_one(client.certificate(name), output)


@cert_app.command("rotate")
def rotate_certificates(
    name: Annotated[str | None, typer.Argument(help="Without one: the gateways' certificates.")] = None,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Renew certificates now; open connections stay."""
    with options.connect(profile) as client:
        show_list(client.rotate_certificates(name), _CERT_COLUMNS, output)


@audit_app.command("verify")
def verify_audit(
    file: Annotated[
        Path | None,
        typer.Argument(help="What `ingle endpoint evidence` printed; without one, the installation's records."),
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option("--public-key", help="PEM; that alone is needed to check a file.")
    ] = None,
    head: Annotated[
        str | None, typer.Option("--head", help="One that an earlier run printed: it must still fit.")
    ] = None,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """Whether all records are there, as they were written, in order. Exits 1 where they aren't.

    A file is checked here, without the installation.
    """
    if file is not None:
        _verify_file(file, public_key, output)
        return
    if public_key is not None:
        raise typer.BadParameter("--public-key is for a file")
    with options.connect(profile) as client:
        found = client.verify_audit(head)
        show_one(found, output)
        if not found.intact:
            raise typer.Exit(1)


def _verify_file(file: Path, public_key: Path | None, output: options.Format) -> None:
    from control_plane.api.schemas import AuditCheck, AuditFault
    from control_plane.evidence import lines_of, verify

    if public_key is None:
        raise typer.BadParameter("give --public-key: `ingle audit key` prints it")
    try:
        key = public_key.read_text()
        with file.open(encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
            verdict = verify(lines_of(lines), key)
    except OSError as error:
        raise InvalidInput(f"{error.filename} can't be read: {error.strerror}", param="file") from None
    faults = [AuditFault(seq=fault.seq, kind=fault.kind, message=fault.message) for fault in verdict.faults]
    found = AuditCheck(
        intact=not faults,
        records=verdict.records,
        seq=verdict.records,
        head=verdict.head,
        faults=faults,
        public_key=key,
    )
    show_one(found, output)
    if faults:
        raise typer.Exit(1)
    about = verdict.about
    say(f"{about.get('endpoint')} in {about.get('region')}, written at {about.get('written_at')}")


@audit_app.command("key")
def audit_key(profile: options.ProfileFile = None) -> None:
    """The public key by which records and evidence are checked, in PEM: give it to whoever is to check."""
    with options.connect(profile) as client:
        print(client.verify_audit(None).public_key, end="")


@audit_app.command("list")
def list_audit(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000)] = 50,
    output: options.Output = options.Format.TABLE,
    profile: options.ProfileFile = None,
) -> None:
    """The last changes, newest first."""
    with options.connect(profile) as client:
        show_list(client.audit(limit), ("at", "actor", "role", "action", "target", "detail"), output)
