"""One frozen, validated settings tree: TOML file < environment (`INGLE_*`) < flags.

The file is `HOME/ingle.toml`. A nested field is spelled with two underscores in the environment
(`INGLE_LIMITS__MAX_HELD=100`); lists and tables are JSON there.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, model_validator

from control_plane.domain import Address
from control_plane.errors import ConfigError
from control_plane.jurisdiction import Jurisdiction
from control_plane.provider_settings import AwsSettings, KubernetesSettings, RaySettings
from control_plane.section import Collector, Domain, HostPort, Name, Network, Seconds, Section, arn_region


class AcmeSettings(Section):
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


class KeyringSettings(Section):
    """What secrets at rest are sealed by: a file of this machine, or a key of AWS KMS."""

    file: Path | None = None
    """Where the local keys are; `HOME/keyring` where nothing is said. Best on another disk than HOME's backups."""
    kms_key: str | None = None
    """An id, an ARN or an alias. What was sealed by the local keys is still opened; `ingle keyring rotate` moves it."""
    aws_region: str | None = None
    endpoint_url: str | None = None

    @property
    def place(self) -> str:
        """Where the keys are: of the installation, not of a region."""
        if self.kms_key is None:
            return "the control plane's machine"
        return f"AWS KMS in {arn_region(self.kms_key) or self.aws_region or 'the region that the environment names'}"


class BackupSettings(Section):
    """Where backups are kept."""

    jurisdiction: Jurisdiction | None = None
    """Whose law holds there. Where a region has a jurisdiction there is no backup without this."""
    accepts: tuple[str, ...] = Field(default=(), max_length=100)
    """Jurisdictions whose records may lie there though it isn't theirs, and regions that these settings had: somebody
    answers for that. It is on record with each backup."""


class RegionSettings(Section):
    """A region: where its replicas run and where its gateway listens."""

    name: Name
    jurisdiction: Jurisdiction | None = None
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
    otlp_endpoint: Collector | None = None
    """The collector that spans and metrics of the region go to, and nowhere else. Without one a region that has a
    jurisdiction sends none; any other sends to where `OTEL_EXPORTER_OTLP_ENDPOINT` says."""

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


class ReceiverSettings(Section):
    """Who is told of alerts, and how. What it is reached by is a secret, and never shown."""

    name: Name
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


class AlertSettings(Section):
    """The controller's own watch over the installation: alerts without Prometheus, and the history of endpoints."""

    enabled: bool = True
    interval: Seconds = 15.0
    """Between two looks at all metrics."""
    scale: float = Field(1.0, gt=0, le=1)
    """Shortens all windows: 0.01 makes a minute of what takes an hour and a half, to try things out."""
    receivers: tuple[ReceiverSettings, ...] = Field(default=(), max_length=20)


class Limits(Section):
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


class Timing(Section):
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
    drift_tolerance: Seconds = 120.0
    """How far apart a replica's beginning by its provider and by our records may be."""
    snapshot_poll: Seconds = 0.5
    demand_report: Seconds = 1.0
    demand_stale: Seconds = 15.0
    usage_flush: Seconds = 0.5
    certificate_check: Seconds = 5.0
    stop_grace: Seconds = 15.0


_LISTS = ("regions", "replica_command", "trusted_proxies", "receivers", "accepts")


class Settings(Section):
    home: Path
    database_url: str = ""
    admin: HostPort = "127.0.0.1:8440"
    gateway: HostPort = "127.0.0.1:8443"
    metrics: HostPort | None = None
    """Where this process also answers `/metrics`, in plain HTTP: a controller that runs alone has no other place."""
    regions: tuple[RegionSettings, ...] = (RegionSettings(name="local-eu"), RegionSettings(name="local-me"))
    domain: Domain | None = None
    """Where it is set, an endpoint is also `ENDPOINT.REGION.DOMAIN`: `*.REGION.DOMAIN` must lead to its gateways."""
    replica_command: tuple[str, ...] = (sys.executable, "-m", "data_plane", "serve")
    replica_log_bytes: int = Field(8 * 1024 * 1024, ge=4096)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    certificate_days: int = Field(90, ge=1, le=825)
    trusted_proxies: tuple[Network, ...] = ()
    """Networks whose X-Forwarded-For is believed: the load balancers before the gateways."""
    replica_tls: bool = False
    """Whether replicas are reached by mutual TLS. On one machine their token and the loopback interface do without."""
    replica_certificate_seconds: Seconds = 86_400.0
    """Lifetime of the certificates that gateways, controllers and replicas show one another."""
    keyring: KeyringSettings = KeyringSettings()
    backup: BackupSettings = BackupSettings()
    alerts: AlertSettings = AlertSettings()
    limits: Limits = Limits()
    timing: Timing = Timing()

    @model_validator(mode="after")
    def _private(self) -> Settings:
        far = [region.name for region in self.regions if region.provider != "local"]
        if far and not self.replica_tls:
            raise ValueError(f"replica_tls must be true: replicas of {', '.join(far)} are on other machines")
        return self

    @model_validator(mode="after")
    def _collectors(self) -> Settings:
        owners: dict[str, RegionSettings] = {}
        for region in self.regions:
            first = owners.setdefault(region.otlp_endpoint or region.name, region)
            if first.jurisdiction != region.jurisdiction:
                both = f"{first.name} and {region.name}"
                raise ValueError(f"regions: otlp_endpoint of {both} is the same, and their jurisdictions aren't")
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
        said = _SAID.get(item["type"]) or _SHOULD.sub("must", item["msg"].removeprefix("Value error, "))
        parts.append(f"{where}: {said}")
    return "; ".join(parts)


_SAID = {
    "extra_forbidden": "there is no such field",
    "missing": "is missing",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of fields",
    "model_type": "must be a mapping of fields",
    "model_attributes_type": "must be a mapping of fields",
}
_SHOULD = re.compile(r"^(?:Input|String|List|Tuple|Dictionary|Value|Set) should")


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
        if isinstance(nested, type) and issubclass(nested, Section):
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
