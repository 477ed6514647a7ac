"""What `ingle doctor` looks at on this machine. Each check says what it found and, where it isn't well, what to do."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from control_plane.domain import Address
from control_plane.errors import IngleError

if TYPE_CHECKING:
    from control_plane.config import Settings

Status = Literal["ok", "warn", "fail"]
_GIB = 1024**3
_SKEW_WARN, _SKEW_FAIL = 2.0, 30.0
_SLOW_MS = 50.0
_CONNECT_SECONDS = 3.0


class Check(BaseModel):
    name: str
    status: Status
    found: str
    do: str = ""


Checker = Callable[["Settings"], Iterator[Check]]


def examine(settings: Settings, checkers: tuple[Checker, ...]) -> Iterator[Check]:
    """Run them all: one that fails itself is a failed check, and the others go on."""
    for checker in checkers:
        try:
            yield from checker(settings)
        except (IngleError, OSError, ValueError, subprocess.SubprocessError) as error:
            message = error.message if isinstance(error, IngleError) else str(error)
            yield Check(name=checker.__name__, status="fail", found=message, do="mend that, then ask again")


def versions(settings: Settings) -> Iterator[Check]:
    python = platform.python_version()
    fine = sys.version_info >= (3, 11)
    do = "" if fine else "install Python 3.11 or newer"
    yield Check(
        name="version", status="ok" if fine else "fail", found=f"ingle {version('ingle')}, Python {python}", do=do
    )
    try:
        yield Check(name="engine", status="ok", found=f"torch {version('torch')}")
    except PackageNotFoundError:
        yield Check(
            name="engine",
            status="warn",
            found="torch isn't installed: replicas can't run on this machine",
            do="pip install 'ingle[engine]', unless this machine runs the control plane only",
        )


def accelerator(settings: Settings) -> Iterator[Check]:
    if shutil.which("nvidia-smi") is None:
        if Path("/dev/nvidiactl").exists():
            do = "install the driver's user-space tools, so that nvidia-smi runs"
            yield Check(name="accelerator", status="fail", found="a GPU without its driver's tools", do=do)
        elif Path("/dev/kfd").exists():
            yield Check(name="accelerator", status="ok", found="an AMD GPU (/dev/kfd)")
        else:
            yield Check(name="accelerator", status="ok", found="none: replicas run on the CPU")
        return
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        found = (done.stdout + done.stderr).strip().splitlines() or ["nvidia-smi failed"]
        do = "load the driver that fits this kernel, or reboot after its upgrade"
        yield Check(name="accelerator", status="fail", found=found[0][:200], do=do)
        return
    for line in done.stdout.strip().splitlines()[:16]:
        told = [part.strip() for part in line.split(",")]
        if len(told) != 3:
            do = "see what nvidia-smi says by itself"
            yield Check(name="accelerator", status="fail", found=f"nvidia-smi said {line[:200]!r}", do=do)
            continue
        yield Check(name="accelerator", status="ok", found=f"{told[0]}, {told[2]}, driver {told[1]}")


def processor(settings: Settings) -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].split("\n", 1)[0].split())
    except OSError:
        flags = set()
    known = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if name in flags]
    slow = platform.machine() in ("x86_64", "AMD64") and "avx2" not in flags
    yield Check(
        name="processor",
        status="warn" if slow else "ok",
        found=f"{platform.machine()}, {cores} cores, {', '.join(known) or 'no vector extensions that we know'}",
        do="the CPU engine is slow without AVX2: use a newer machine type" if slow else "",
    )
    compiler = next(
        (name for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name and shutil.which(name)), None
    )
    yield Check(
        name="compiler",
        status="ok" if compiler else "warn",
        found=str(shutil.which(compiler)) if compiler else "none: the CPU engine runs on torch, and slower",
        do="" if compiler else "install gcc or clang",
    )


def disk(settings: Settings) -> Iterator[Check]:
    cache = Path(os.environ.get("INGLE_CACHE") or Path.home() / ".cache" / "ingle").expanduser()
    for name, folder in (("disk", settings.home), ("cache", cache)):
        there = _existing(folder)
        free = shutil.disk_usage(there).free / _GIB
        writable = os.access(there, os.W_OK)
        status: Status = "ok" if writable and free > 5 else "warn" if writable and free > 1 else "fail"
        do = (
            "make it writable for this user"
            if not writable
            else ""
            if free > 5
            else "free some space or name another folder"
        )
        yield Check(name=name, status=status, found=f"{free:.1f} GiB free at {folder}", do=do)
    if settings.home.is_dir():
        open_to_others = stat.S_IMODE(settings.home.stat().st_mode) & 0o077
        if open_to_others:
            yield Check(name="home", status="warn", found="others may look into it", do=f"chmod 700 {settings.home}")
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) / 1024**2
    except (OSError, KeyError):
        return
    low = free < 2
    do = "stop what needs memory, or expect replicas to be killed" if low else ""
    yield Check(name="memory", status="warn" if low else "ok", found=f"{free:.1f} GiB available", do=do)


def provider(settings: Settings) -> Iterator[Check]:
    """What this installation may do where its replicas run, and with the services that its settings name."""
    yield from _local(settings)
    yield from _ray(settings)
    kms = settings.keyring
    if kms.kms_key:
        rights = "kms:DescribeKey"
        yield from _aws("kms", kms.aws_region, kms.endpoint_url, rights, "describe_key", KeyId=kms.kms_key)
    for region in settings.regions:
        if region.acme is not None and region.acme.challenge == "dns-01":
            acme = region.acme
            yield from _aws(
                "route53", acme.aws_region, acme.endpoint_url, "route53:ListHostedZones", "list_hosted_zones"
            )


def _local(settings: Settings) -> Iterator[Check]:
    if not any(region.provider == "local" for region in settings.regions):
        return
    program = settings.replica_command[0]
    if shutil.which(program) is None:
        do = "set replica_command to a program that is there"
        yield Check(name="provider", status="fail", found=f"{program} can't be run", do=do)
    else:
        with tempfile.TemporaryDirectory(dir=_existing(settings.home)):
            pass  # where replicas' folders are made
        yield Check(name="provider", status="ok", found="local: may start replicas here")


def _ray(settings: Settings) -> Iterator[Check]:
    """Ray itself, each cluster's token, and whether something listens at its head."""
    regions = [region for region in settings.regions if region.ray is not None]
    if not regions:
        return
    try:
        yield Check(name="provider", status="ok", found=f"ray {version('ray')}")
    except PackageNotFoundError:
        yield Check(name="provider", status="fail", found="ray isn't installed", do="pip install 'ingle[ray]'")
    for ray in dict.fromkeys(region.ray for region in regions if region.ray is not None):
        name = f"ray {ray.address}"
        try:
            empty = not ray.token_file.read_text().strip()
        except OSError as error:
            do = f"put the cluster's token there: {error.strerror}"
            yield Check(name=name, status="fail", found=f"{ray.token_file} can't be read", do=do)
            continue
        if empty:
            yield Check(
                name=name, status="fail", found=f"{ray.token_file} is empty", do="put the cluster's token there"
            )
            continue
        head = Address.parse(ray.address)
        try:
            socket.create_connection((head.host, head.port), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            do = "start the cluster's head, or let this machine reach it"
            yield Check(name=name, status="fail", found=f"doesn't answer: {error}", do=do)
        else:
            yield Check(name=name, status="ok", found="listens; `ingle region list` asks what it offers")


def _aws(
    service: str, region: str | None, url: str | None, right: str, method: str, **arguments: str
) -> Iterator[Check]:
    from botocore.exceptions import BotoCoreError, ClientError

    from control_plane.security.aws import aws_client

    try:
        getattr(aws_client(service, region, url), method)(**arguments)
    except (BotoCoreError, ClientError) as error:
        yield Check(name=service, status="fail", found=str(error)[:200], do=f"give these credentials {right}")
    else:
        yield Check(name=service, status="ok", found=f"{right} is allowed")


def database(settings: Settings) -> Iterator[Check]:
    from control_plane.store.health import measure
    from control_plane.store.schema import schema_status

    url = settings.store_url
    if url.startswith("sqlite") and not Path(url.partition("///")[2]).exists():
        yield Check(
            name="database", status="warn", found="there is none yet", do="`ingle up` or `ingle db upgrade` makes it"
        )
        return
    schema = schema_status(url)
    do = "" if schema.up_to_date else "run `ingle db upgrade`" if schema.known else "install the ingle that wrote it"
    yield Check(name="database", status="ok" if schema.up_to_date else "fail", found=f"schema {schema.current}", do=do)
    health = measure(url)
    slow = health.latency_ms > _SLOW_MS
    yield Check(
        name="latency",
        status="warn" if slow else "ok",
        found=f"{health.latency_ms:.1f} ms to the database",
        do="bring the control plane nearer to it" if slow else "",
    )
    if health.ahead is not None:
        yield skew("the database", health.ahead)


def skew(whose: str, ahead: float, exact: float = 0.0) -> Check:
    """`exact` is how far off the reading itself may be, in seconds."""
    off = max(0.0, abs(ahead) - exact)
    status: Status = "fail" if off > _SKEW_FAIL else "warn" if off > _SKEW_WARN else "ok"
    do = "" if status == "ok" else "keep both clocks by NTP (timedatectl set-ntp true)"
    return Check(name="clock", status=status, found=f"{whose} is {ahead:+.1f} s from this machine", do=do)


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())
