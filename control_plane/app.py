"""Wires every role, in reading order: what all share, then gateways, admin API, controller, and running them.

`ingle up` runs all roles in this one process; `ingle serve ROLE` runs one.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from control_plane.alerts import watch
from control_plane.alerts.scrape import Scraper
from control_plane.api.accounts import AccountOperations
from control_plane.api.endpoints import EndpointOperations
from control_plane.api.evidence import EvidenceOperations
from control_plane.api.live import LiveOperations
from control_plane.api.metering import MeteringOperations
from control_plane.api.observing import ObservingOperations
from control_plane.api.places import Places
from control_plane.api.platform import PlatformOperations
from control_plane.api.rollouts import RolloutOperations
from control_plane.api.server import AdminApi
from control_plane.api.trial import Trials
from control_plane.autoscaler.loop import Autoscaler
from control_plane.config import AcmeSettings, Settings, Timing
from control_plane.domain import Address
from control_plane.errors import ConfigError, StoreUnavailable
from control_plane.gateway.challenges import ChallengeResponder
from control_plane.gateway.hosts import host_names
from control_plane.gateway.server import Gateway
from control_plane.listener import TlsListener
from control_plane.observe.exporter import Exporter
from control_plane.observe.exports import GENERAL, Export, Why, exports_of
from control_plane.observe.logs import event
from control_plane.observe.tracing import Tracing
from control_plane.providers.catalogue import Providers, open_providers
from control_plane.reconciler.holding import owner_name
from control_plane.reconciler.loop import Reconciler
from control_plane.reconciler.stop import end_all
from control_plane.security.acme import AcmeClient
from control_plane.security.audit import AuditSigner
from control_plane.security.aws import aws_client
from control_plane.security.certificates import LOCAL_NAMES, CertificateAuthority
from control_plane.security.challenges import FileSolver, Route53Solver, Solver
from control_plane.security.keyring import Keyring, open_keyring
from control_plane.security.mesh import PLAIN, Link, Mesh
from control_plane.security.secret import Secret, load_secret
from control_plane.security.sources import AcmeSource, AuthoritySource, CertificateSource, FilesSource
from control_plane.store.database import Store
from control_plane.store.schema import require_schema, upgrade_schema

_ANY_HOST = ("0.0.0.0", "::")
_RELAXED = 4.0
_COLLECT_AFTER = (20_000, 20, 50)
Loop = Callable[[], Awaitable[None]]


class Role(StrEnum):
    API = "api"
    GATEWAY = "gateway"
    CONTROLLER = "controller"


@dataclass(frozen=True)
class Platform:
    """What all roles share."""

    settings: Settings
    secret: Secret
    store: Store
    authority: CertificateAuthority
    tracing: Tracing
    providers: Providers
    exports: Mapping[str, Export]
    mesh: Mesh | None

    @property
    def link(self) -> Link:
        """How replicas are reached."""
        return self.mesh.link if self.mesh else PLAIN


@dataclass(frozen=True)
class Running:
    """Where the roles of this process are reached."""

    platform: Platform
    admin_url: str | None = None
    gateway_urls: dict[str, str] = field(default_factory=dict)


async def open_platform(settings: Settings, *, migrate: bool, without_store: bool) -> Platform:
    """Raises ConfigError where the home, the database or its schema can't be used.

    `without_store` lets it open while the database is away.
    """
    keyring = keyring_of(settings)
    secret = load_secret(settings.home, keyring)
    try:
        await asyncio.to_thread(upgrade_schema if migrate else require_schema, settings.store_url)
    except StoreUnavailable as error:
        if not without_store:
            raise
        event("store_unavailable", level=logging.WARNING, reason=error.message)
    authority = CertificateAuthority(settings.home, settings.certificate_days, keyring)
    mesh = Mesh(authority, settings.replica_certificate_seconds) if settings.replica_tls else None
    exports = exports_of(settings.regions, os.environ)
    for region, export in exports.items():
        if export.why is Why.WITHHELD and os.environ.get(f"{GENERAL}_ENDPOINT"):
            event("telemetry.withheld", level=logging.WARNING, region=region, hint="it has no otlp_endpoint of its own")
    return Platform(
        settings=settings,
        secret=secret,
        store=Store(settings.store_url),
        authority=authority,
        tracing=Tracing("ingle", exports),
        providers=open_providers(settings, secret, mesh, exports),
        exports=exports,
        mesh=mesh,
    )


def keyring_of(settings: Settings) -> Keyring:
    """What secrets at rest are sealed by. Raises ConfigError where boto3 is wanted and missing."""
    found = settings.keyring
    client = aws_client("kms", found.aws_region, found.endpoint_url) if found.kms_key else None
    return open_keyring(settings.home, kms_key=found.kms_key, kms_client=client, file=found.file)


async def serve(
    settings: Settings,
    roles: Collection[Role],
    *,
    regions: Collection[str],
    ready: Callable[[Running], Awaitable[None]],
    migrate: bool = False,
    end_replicas: bool = False,
) -> None:
    """Run `roles` until SIGTERM or SIGINT, then stop them cleanly.

    `regions` says which gateways to run. `ready` is awaited once everything listens.
    """
    stop = asyncio.Event()
    _stop_on_signals(stop)
    _open_many()
    async with AsyncExitStack() as stack:
        # A gateway serves from the last word that it was given.
        platform = await open_platform(settings, migrate=migrate, without_store=set(roles) == {Role.GATEWAY})
        stack.push_async_callback(platform.store.close)
        stack.callback(platform.tracing.close)
        stack.push_async_callback(platform.providers.close)
        loops: list[Loop] = [] if platform.store.sqlite else [platform.store.listen]
        loops += [platform.mesh.run] if platform.mesh else []
        relaxed = _relaxed(settings.timing) if set(Role) <= set(roles) else settings.timing
        gateway_urls: dict[str, str] = {}
        if Role.CONTROLLER in roles and end_replicas:
            grace = settings.timing.terminate_grace + settings.timing.stop_grace
            stack.push_async_callback(end_all, platform.store, platform.providers.by_region, within=grace)
        if Role.CONTROLLER in roles:
            loops += _controller(platform, relaxed, gateway_urls)
        # Pushed after what they depend on, so that on the way out tenants are let go first.
        background = await stack.enter_async_context(_Background())
        if Role.GATEWAY in roles:
            for region in regions:
                url, gateway_loops = await _gateway(platform, relaxed, region, stack)
                gateway_urls[region] = url
                loops += gateway_loops
        admin_url = None
        if Role.API in roles:
            admin_url, api_loops = await _api(platform, stack)
            loops += api_loops
        if settings.metrics:
            exporter = Exporter(Address.parse(settings.metrics))
            stack.push_async_callback(exporter.close)
            await exporter.start()
        for loop in loops:
            background.start(loop, stop)
        _collect_less()
        await ready(Running(platform, admin_url, gateway_urls))
        await stop.wait()
        event("stopping")
    background.raise_fault()


def _relaxed(timing: Timing) -> Timing:
    """For loops that all run in one process: what one of them writes wakes the others, and polling is for strangers."""
    return timing.model_copy(update={name: getattr(timing, name) * _RELAXED for name in ("tick", "snapshot_poll")})


def _controller(platform: Platform, relaxed: Timing, gateway_urls: dict[str, str]) -> list[Loop]:
    # Replicas don't wake anybody: the reconciler keeps looking at them.
    timing = platform.settings.timing
    owner = owner_name()
    reconciler = Reconciler(
        platform.store,
        platform.providers.by_region,
        timing,
        owner=owner,
        link=platform.link,
        replica_token=platform.secret.replica_token,
        tracing=platform.tracing,
    )
    loops: list[Loop] = [reconciler.run, Autoscaler(platform.store, relaxed).run]
    alerts = platform.settings.alerts
    if alerts.enabled:
        # this process's gateways come later, and are then known by their URLs
        ca_file = platform.authority.ca_file
        loops.append(watch(platform.store, platform.secret, alerts, owner, ca_file, platform.link, gateway_urls))
    return loops


async def _gateway(platform: Platform, timing: Timing, region: str, stack: AsyncExitStack) -> tuple[str, list[Loop]]:
    settings = platform.settings
    address = settings.gateway_address(region)
    gateway = Gateway(
        platform.store,
        platform.secret,
        platform.tracing,
        home=settings.home,
        region=region,
        gateway_id=f"{region}@{socket.gethostname()}"[:40] + f":{address.port or os.getpid()}",
        limits=settings.limits,
        timing=timing,
        trusted_proxies=settings.trusted_proxies,
        link=platform.link,
        domain=settings.domain,
    )
    stack.push_async_callback(gateway.close)
    await gateway.keeper.start()
    found = settings.region(region)
    public = found.public_url if found else None
    name = f"gateway-{region}"
    source: CertificateSource = AuthoritySource(
        platform.authority, name, [*_host_names(address, public), *host_names(region, settings.domain)]
    )
    if found is not None and found.certificate is not None and found.key is not None:
        source = FilesSource(found.certificate, found.key)
    if found is not None and found.acme is not None:
        source = await _acme(platform, found.acme, name, source, stack)
    listener = TlsListener(
        gateway.server,
        address,
        source,
        name,
        folder=platform.authority.folder,
        check=settings.timing.certificate_check,
        flag="--gateway",
    )
    await listener.start()
    stack.push_async_callback(listener.stop, settings.timing.stop_grace)
    gateway.url = public or _url(listener.address)
    await gateway.announce()
    return gateway.url, [gateway.run, listener.run]


async def _acme(
    platform: Platform, acme: AcmeSettings, name: str, fallback: CertificateSource, stack: AsyncExitStack
) -> AcmeSource:
    folder = platform.authority.folder / "acme"

    keyring = platform.authority.keyring
    solver: Solver
    if acme.challenge == "dns-01":
        solver = Route53Solver(aws_client("route53", acme.aws_region, acme.endpoint_url), acme.zone)
    else:
        solver = FileSolver(folder / "challenges")
        responder = ChallengeResponder(solver.folder, Address.parse(acme.http))
        await responder.start()
        stack.push_async_callback(responder.close)

    def client() -> AcmeClient:
        return AcmeClient(acme.directory, folder, solver, email=acme.email, ca_file=acme.ca_file, keyring=keyring)

    return AcmeSource(client, folder / f"{name}.pem", acme.names, fallback, keyring=keyring)


async def _api(platform: Platform, stack: AsyncExitStack) -> tuple[str, list[Loop]]:
    settings = platform.settings
    places = Places(settings, platform.providers.offers)
    signer = AuditSigner(platform.secret)
    on_endpoints = EndpointOperations(platform.store, places, platform.providers.logs)
    live = LiveOperations(platform.store, platform.secret, platform.link)
    trials = Trials(platform.store, platform.secret, places, signer.seal, platform.authority.ca_file)
    operations = [
        *on_endpoints.table(),
        *RolloutOperations(platform.store, on_endpoints.view).table(),
        *EvidenceOperations(
            platform.store, settings, platform.exports, signer, platform.providers.describe, platform.providers.kept
        ).table(),
        *AccountOperations(platform.store, platform.secret).table(),
        *MeteringOperations(platform.store).table(),
        *live.table(),
        *ObservingOperations(platform.store).table(),
        *PlatformOperations(platform.store, places, platform.authority, signer, version("ingle")).table(),
    ]
    scraper = Scraper(platform.store, platform.secret, link=platform.link)
    stack.push_async_callback(scraper.close)
    api = AdminApi(
        platform.store,
        platform.secret,
        operations,
        version("ingle"),
        live=live,
        trials=trials,
        read_replicas=scraper.replicas_text,
    )
    address = Address.parse(settings.admin)
    stack.push_async_callback(api.close)
    listener = TlsListener(
        await api.start(),
        address,
        AuthoritySource(platform.authority, "admin", _host_names(address, None)),
        "admin",
        folder=platform.authority.folder,
        check=settings.timing.certificate_check,
        flag="--admin",
    )
    await listener.start()
    stack.push_async_callback(listener.stop, 1.0)
    return _url(listener.address), [listener.run]


def _open_many() -> None:
    """As many connections as the system lets this process have: shells start programs with far fewer."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _collect_less() -> None:
    """What was made at the start stays: looking through it again and again took a sixth of a busy gateway's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


class _Background:
    """Tasks that run until the platform stops. One that fails stops the platform, and its error is kept."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._fault: BaseException | None = None

    async def __aenter__(self) -> _Background:
        return self

    def start(self, work: Loop, stop: asyncio.Event) -> None:
        async def run() -> None:
            try:
                await work()
            except Exception as error:
                self._fault = error
                stop.set()

        self._tasks.append(asyncio.create_task(run()))

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault


@contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Hold `home` for this process's `ingle up`. Raises ConfigError where another one has it."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(home / "up.lock", "a")  # noqa: SIM115  # held open on purpose
    except OSError as error:
        raise ConfigError(f"{home} can't be used ({error.strerror}): choose a writable --home", param="home") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another `ingle up` runs on {home}: stop it or choose another --home", code="already_running"
            ) from None
        yield


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def asked() -> None:
        stop.set()
        # A second signal ends the process at once.
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError):
                loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)


def _host_names(address: Address, public_url: str | None) -> list[str]:
    names = [*LOCAL_NAMES]
    for extra in (address.host, urlsplit(public_url).hostname if public_url else None):
        if extra and extra not in names and extra not in _ANY_HOST:
            names.append(extra)
    return names


def _url(address: Address) -> str:
    host = "127.0.0.1" if address.host in _ANY_HOST else address.host
    return f"https://{Address(host, address.port)}"
