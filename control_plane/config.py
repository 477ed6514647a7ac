"""One frozen, validated settings tree: TOML file < environment (`INGLE_*`) < flags.

The file is `HOME/ingle.toml`. A nested field is spelled with two underscores in the environment
(`INGLE_LIMITS__MAX_HELD=100`); lists and tables are JSON there.
"""

from __future__ import annotations

import ipaddress
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from control_plane.domain import Address, is_name
from control_plane.errors import ConfigError

Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _address(text: str) -> str:
    Address.parse(text)
    return text


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError("must be a DNS label: lower-case letters, digits and hyphens")
    return text


def _network(text: str) -> str:
    return str(ipaddress.ip_network(text))


def _domain(text: str) -> str:
    name = text.lower().rstrip(".")
    if not all(is_name(label) for label in name.split(".")):
        raise ValueError("must be a domain name, such as llm.example.com")
    return name


HostPort = Annotated[str, AfterValidator(_address)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AcmeSettings(_Section):
    """A certificate from an ACME authority, which asks whether the names are ours: at `http`, or in the DNS.

    `dns-01` puts records into Route 53, into the hosted zone `zone` or the one that fits best.
    """

    directory: str
    names: tuple[str, ...] = Field(min_length=1, max_length=100)
    email: str | None = None
    challenge: Literal["http-01", "dns-01"] = "http-01"
    http: HostPort = "0.0.0.0:80"
    zone: str | None = None
    aws_region: str = "us-east-1"
    endpoint_url: str | None = None
    ca_file: Path | None = None
    """For an authority whose own certificate isn't publicly trusted."""


class KeyringSettings(_Section):
    """What secrets at rest are sealed by: a file of this machine, or a key of AWS KMS."""

    file: Path | None = None
    """Where the local keys are; `HOME/keyring` where nothing is said. Best on another disk than HOME's backups."""
    kms_key: str | None = None
    """An id, an ARN or an alias. What was sealed by the local keys is still opened; `ingle keyring rotate` moves it."""
    aws_region: str | None = None
    endpoint_url: str | None = None


_LABEL = r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,250}[A-Za-z0-9])?$"
_LABEL_VALUE = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"


class RaySettings(_Section):
    """The Ray cluster that a region's replicas run in, and which of its nodes are the region's.

    The control plane's machine must be a node of the cluster, if only one without resources.
    """

    address: HostPort
    """Of the cluster's head."""
    token_file: Path
    """Holds the cluster's authentication token: its nodes were started with RAY_AUTH_MODE=token."""
    label: str = Field("region", pattern=_LABEL)
    value: str | None = Field(None, pattern=_LABEL_VALUE)
    """Of the label of the region's nodes; the region's name where nothing is said."""
    cpus: float = Field(1.0, gt=0, le=1024)
    """What a replica takes of its node's CPUs."""
    queue_seconds: Seconds = 60.0
    """How long a replica may wait in the cluster's queue before that counts as no capacity."""
    node_home: str | None = None
    """A folder of each node, for its replicas' logs; `~/.ingle/node` where nothing is said."""


class AwsMachine(_Section):
    """A type of instance that replicas may run on."""

    type: str = Field(pattern=r"^[a-z0-9-]{1,30}\.[a-z0-9-]{1,30}$")
    accelerator: str = Field("cpu", pattern=_LABEL_VALUE)
    """What `--gpu` names it by, such as L4; "cpu" for a type without."""
    count: int = Field(1, ge=1, le=64)
    """How many accelerators it has."""
    price_per_hour: float = Field(0.0, ge=0, le=10_000)


class AwsSettings(_Section):
    """Where in AWS a region's replicas run: what the stack of `infra/aws/region.yaml` made there."""

    aws_region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]{1,2}$")
    bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
    launch_template: str = Field(pattern=r"^lt-[0-9a-f]{8,32}$")
    subnets: tuple[Annotated[str, Field(pattern=r"^subnet-[0-9a-f]{8,32}$")], ...] = Field(min_length=1, max_length=16)
    """One of each zone, the preferred first."""
    machines: tuple[AwsMachine, ...] = Field(min_length=1, max_length=32)
    """The cheapest that has what a replica asks is tried first."""
    kms_key: str | None = None
    """Seals the replicas' secrets; AWS's own key for the account where nothing is said."""
    spot: bool = False
    """Whether instances are spot ones, which AWS may take back with two minutes' notice."""
    address: Literal["private", "public"] = "private"
    """Which of an instance's addresses gateways and controllers reach it at."""
    port: int = Field(8100, ge=1, le=65535)
    python: str = Field("/opt/ingle/bin/python", pattern=r"^/[A-Za-z0-9._/-]{1,200}$")
    """The image's interpreter that has `ingle[engine,aws]`."""
    node_home: str = Field("/var/lib/ingle", pattern=r"^/[A-Za-z0-9._/-]{1,200}$")
    """A folder of the instance, for the replica's logs and weights."""
    deadman_minutes: int = Field(60, ge=1, le=10_080)
    """How long an instance lives on without a word from a controller; then it powers off, and so is terminated."""
    cool_down: Seconds = 120.0
    """How long a type isn't asked for in a zone that had no capacity for it."""
    settle_seconds: Seconds = 60.0
    """How long a new instance may be unknown to those who ask AWS for it."""
    reap_grace: float = Field(60.0, ge=0, le=3600)
    """How old an instance is, in seconds, before it may count as nobody's."""
    endpoint_url: str | None = None
    """Another place than AWS's own, to try things out."""


class KubernetesAccelerator(_Section):
    """A kind of accelerator that nodes have: what `--gpu` names."""

    resource: str = Field("nvidia.com/gpu", pattern=_LABEL)
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=10)
    """Labels of the nodes that have this kind."""


class KubernetesSettings(_Section):
    """The cluster and namespace that a region's replicas run in as pods, and on which nodes."""

    kubeconfig: Path | None = None
    """The cluster that the control plane itself runs in, where nothing is said."""
    context: str | None = None
    namespace: Annotated[str, AfterValidator(_name)] = "ingle"
    image: str = Field(min_length=1, max_length=512)
    """Has `ingle[engine]`."""
    command: tuple[str, ...] = Field(("python", "-m", "data_plane", "serve"), min_length=1, max_length=32)
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=10)
    """Labels of the region's nodes; `topology.kubernetes.io/region` with the region's name where nothing is said."""
    accelerators: dict[str, KubernetesAccelerator] = Field(default_factory=dict, max_length=50)
    cpu: str = Field("1", pattern=r"^[0-9]+(\.[0-9]+|m)?$")
    """What a replica asks of its node, and its bound of memory."""
    memory: str = Field("2Gi", pattern=r"^[0-9]+(Ki|Mi|Gi|Ti)?$")
    cache_claim: Annotated[str, AfterValidator(_name)] | None = None
    """A claim on a volume for weights; without one each replica fetches its own."""
    user: int = Field(65_532, ge=1)
    port: int = Field(8100, ge=1024, le=65535)
    queue_seconds: Seconds = 60.0
    """How long a pod may wait for a node before that counts as no capacity."""


class RegionSettings(_Section):
    """A region: where its replicas run and where its gateway listens."""

    name: Annotated[str, AfterValidator(_name)]
    jurisdiction: str | None = Field(None, pattern=r"^[A-Z]{2}(-[A-Z0-9]{1,3})?$")
    """Whose law holds there: an ISO 3166 code, such as DE or AE-DU, or EU."""
    provider: Literal["local", "ray", "aws", "kubernetes"] = "local"
    ray: RaySettings | None = None
    """Of a region whose provider is ray."""
    aws: AwsSettings | None = None
    """Of a region whose provider is aws."""
    kubernetes: KubernetesSettings | None = None
    """Of a region whose provider is kubernetes."""
    gateway: HostPort | None = None
    """Defaults to the first region's address with the next ports."""
    public_url: str | None = None
    """What tenants type, where a load balancer stands before the gateway."""
    certificate: Path | None = None
    """A certificate chain, leaf first, and its `key`: for a certificate of somebody else's authority."""
    key: Path | None = None

    acme: AcmeSettings | None = None

    @model_validator(mode="after")
    def _pair(self) -> RegionSettings:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key: both or neither")
        if self.certificate is not None and self.acme is not None:
            raise ValueError("certificate or acme, not both")
        return self

    @model_validator(mode="after")
    def _provided(self) -> RegionSettings:
        for name, own in (("ray", self.ray), ("aws", self.aws), ("kubernetes", self.kubernetes)):
            if (self.provider == name) != (own is not None):
                raise ValueError(f"{name}: its settings are needed where provider is {name}, and only there")
        return self


class ReceiverSettings(_Section):
    """Who is told of alerts, and how. What it is reached by is a secret, and never shown."""

    name: Annotated[str, AfterValidator(_name)]
    kind: Literal["webhook", "slack", "email", "pagerduty"]
    url: SecretStr | None = None
    """Of a webhook or of Slack; for PagerDuty, another place than its own."""
    routing_key: SecretStr | None = None
    """Of PagerDuty's Events API v2."""
    smtp: HostPort | None = None
    sender: str = ""
    to: tuple[str, ...] = Field(default=(), max_length=50)
    username: str | None = None
    password: SecretStr | None = None
    tls: Literal["starttls", "always", "never"] = "starttls"
    ca_file: Path | None = None
    """For a receiver whose certificate isn't publicly trusted."""
    severities: tuple[Literal["critical", "warning"], ...] = ("critical", "warning")
    resolved: bool = True
    """Whether it is told when an alert is over."""

    @property
    def reached_by(self) -> str:
        return self.url.get_secret_value() if self.url else ""

    @model_validator(mode="after")
    def _complete(self) -> ReceiverSettings:
        needed = {
            "webhook": ("url",),
            "slack": ("url",),
            "pagerduty": ("routing_key",),
            "email": ("smtp", "sender", "to"),
        }
        for name in needed[self.kind]:
            if not getattr(self, name):
                raise ValueError(f"{name} is needed for a receiver of kind {self.kind}")
        return self


class AlertSettings(_Section):
    """The controller's own watch over the installation: alerts without Prometheus, and the history of endpoints."""

    enabled: bool = True
    interval: Seconds = 15.0
    """Between two looks at all metrics."""
    scale: float = Field(1.0, gt=0, le=1)
    """Shortens all windows: 0.01 makes a minute of what takes an hour and a half, to try things out."""
    receivers: tuple[ReceiverSettings, ...] = Field(default=(), max_length=20)


class Limits(_Section):
    """Bounds on what a gateway holds at once."""

    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1024)
    max_buffered_bytes: int = Field(1024 * 1024 * 1024, ge=1024)
    """Bytes of all request bodies in memory at once."""
    max_held: int = Field(2048, ge=0)
    """Requests held per endpoint while a replica starts."""
    max_connections: int = Field(16_384, ge=1)
    header_seconds: Seconds = 10.0
    """How long the headers of a request may take."""
    max_held_bytes: int = Field(256 * 1024 * 1024, ge=1024)
    """Bytes of their bodies."""
    max_in_flight: int = Field(8192, ge=1)
    key_concurrency: int = Field(1024, ge=1)
    """Requests at once per key, where the key has no bound of its own."""
    key_requests_per_minute: int = Field(1_000_000, ge=1)
    key_tokens_per_minute: int = Field(1_000_000_000, ge=1)
    """Per key and gateway, where the key has no bounds of its own."""
    body_silence: Seconds = 30.0
    """Longest wait for the next part of a request's body."""
    upstream_connect: Seconds = 5.0
    upstream_silence: Seconds = 600.0
    """Longest wait for the next byte of a reply."""
    snapshot_max_age: float = Field(86_400.0, gt=0)
    """How long a gateway serves without a word from the store."""
    max_spool_bytes: int = Field(64 * 1024 * 1024, ge=4096)


class Timing(_Section):
    """Intervals and patience of the control loops, in seconds."""

    tick: Seconds = 0.5
    starting_tick: Seconds = 0.1
    """The tick while a replica starts or ends."""
    probe_timeout: Seconds = 1.0
    liveness_grace: Seconds = 10.0
    start_timeout: Seconds = 900.0
    drain_settle: Seconds = 1.0
    """How long a draining replica stays, so that no gateway still sends to it."""
    drain_timeout: Seconds = 60.0
    terminate_grace: Seconds = 10.0
    stable_after: Seconds = 20.0
    backoff_base: Seconds = 1.0
    backoff_cap: Seconds = 120.0
    max_failures: int = Field(6, ge=1)
    lease: Seconds = 8.0
    sweep: Seconds = 15.0
    snapshot_poll: Seconds = 0.5
    demand_report: Seconds = 1.0
    demand_stale: Seconds = 15.0
    usage_flush: Seconds = 0.5
    certificate_check: Seconds = 5.0
    stop_grace: Seconds = 15.0


_LISTS = ("regions", "replica_command", "trusted_proxies", "receivers")


class Settings(_Section):
    home: Path
    database_url: str = ""
    admin: HostPort = "127.0.0.1:8440"
    gateway: HostPort = "127.0.0.1:8443"
    metrics: HostPort | None = None
    """Where this process also answers `/metrics`, in plain HTTP: a controller that runs alone has no other place."""
    regions: tuple[RegionSettings, ...] = (RegionSettings(name="local-eu"), RegionSettings(name="local-me"))
    domain: Annotated[str, AfterValidator(_domain)] | None = None
    """Where it is set, an endpoint is also `ENDPOINT.REGION.DOMAIN`: `*.REGION.DOMAIN` must lead to its gateways."""
    replica_command: tuple[str, ...] = (sys.executable, "-m", "data_plane", "serve")
    replica_log_bytes: int = Field(8 * 1024 * 1024, ge=4096)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    certificate_days: int = Field(90, ge=1, le=825)
    trusted_proxies: tuple[Annotated[str, AfterValidator(_network)], ...] = ()
    """Networks whose X-Forwarded-For is believed: the load balancers before the gateways."""
    replica_tls: bool = False
    """Whether replicas are reached by mutual TLS. On one machine their token and the loopback interface do without."""
    replica_certificate_seconds: Seconds = 86_400.0
    """Lifetime of the certificates that gateways, controllers and replicas show one another."""
    keyring: KeyringSettings = KeyringSettings()
    alerts: AlertSettings = AlertSettings()
    limits: Limits = Limits()
    timing: Timing = Timing()

    @model_validator(mode="after")
    def _private(self) -> Settings:
        far = [region.name for region in self.regions if region.provider != "local"]
        if far and not self.replica_tls:
            raise ValueError(f"replica_tls must be true: replicas of {', '.join(far)} are on other machines")
        return self

    def region(self, name: str) -> RegionSettings | None:
        return next((region for region in self.regions if region.name == name), None)

    def gateway_address(self, name: str) -> Address:
        """Where the gateway of region `name` listens."""
        first = Address.parse(self.gateway)
        for index, region in enumerate(self.regions):
            if region.name == name:
                if region.gateway:
                    return Address.parse(region.gateway)
                return Address(first.host, first.port + index if first.port else 0)
        raise ConfigError(f"region {name!r} isn't one of {', '.join(r.name for r in self.regions)}", param="region")

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.home / 'ingle.db'}"


def load_settings(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the tree. `flags` are values given on the command line; None among them means not given.

    Raises ConfigError naming the field.
    """
    env = os.environ if environ is None else environ
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    home = Path(given.get("home") or env.get("INGLE_HOME") or Path.home() / ".ingle").expanduser().absolute()
    values = _read_file(home / "ingle.toml")
    _overlay(values, _from_environment(env))
    _overlay(values, given)
    values["home"] = home
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe_validation(error)) from None
    names = [region.name for region in settings.regions]
    if not names or len(set(names)) != len(names):
        raise ConfigError("regions: at least one, each name once", param="regions")
    return settings


def describe_validation(error: ValidationError) -> str:
    """A validation error as one line: field, then what is wrong with it."""
    parts = []
    for item in error.errors(include_url=False, include_input=False)[:3]:
        where = ".".join(str(step) for step in item["loc"]) or "input"
        parts.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(parts)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, _Section):
            section = {
                inner: _json(key, env[key]) if inner in _LISTS else env[key]
                for inner in nested.model_fields
                if (key := f"INGLE_{name.upper()}__{inner.upper()}") in env
            }
            if section:
                values[name] = section
        elif (key := f"INGLE_{name.upper()}") in env:
            text = env[key]
            values[name] = _json(key, text) if name in _LISTS else text
    return values


def _json(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{key} must be a JSON list", param=key) from None


def _overlay(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for name, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), dict):
            _overlay(base[name], value)
        else:
            base[name] = value
