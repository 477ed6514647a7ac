"""What is asked of EC2 for a replica: where, on what, and what the machine is told. Pure."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from control_plane.domain import ReplicaSpec
from control_plane.errors import ProviderRefused
from control_plane.provider_settings import AwsMachine, AwsSettings
from control_plane.providers.aws_errors import Kind

INSTALLATION, REGION, ENDPOINT, REPLICA, EPOCH = (
    f"ingle:{name}" for name in ("installation", "region", "endpoint", "replica", "epoch")
)
"""Tags of instances and volumes."""


@dataclass(frozen=True, slots=True)
class Place:
    """A type of instance in the zone of a subnet."""

    type: str
    subnet: str


@dataclass(frozen=True, slots=True)
class Intent:
    """What is asked of EC2, to the letter: whoever repeats it must repeat all of it, or a second instance starts.

    `epoch` is when it was first wanted, in seconds; `tried` is where there was no room.
    """

    epoch: int
    nonce: str
    request: Mapping[str, Any]
    tried: tuple[Place, ...] = ()

    @property
    def place(self) -> Place:
        return Place(str(self.request["InstanceType"]), str(self.request["SubnetId"]))

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, body: bytes) -> Intent:
        said = json.loads(body)
        return cls(said["epoch"], said["nonce"], said["request"], tuple(Place(**place) for place in said["tried"]))


@dataclass
class CoolDowns:
    """Where there was no room a while ago. `seconds` is how long that is believed."""

    seconds: float
    until: dict[Place, float] = field(default_factory=dict)

    def note(self, place: Place, now: float) -> None:
        self.until = {at: end for at, end in self.until.items() if end > now} | {place: now + self.seconds}

    def cold(self, place: Place, now: float) -> bool:
        return self.until.get(place, now) > now


def fitting(spec: ReplicaSpec, machines: Sequence[AwsMachine]) -> list[AwsMachine]:
    """Machines that have what the replica asks, the cheapest first.

    Raises ProviderRefused where none ever will.
    """
    wanted = spec.gpu or "cpu"
    fits = [machine for machine in machines if _has(machine, wanted) and machine.count >= spec.gpus]
    if not fits:
        offered = ", ".join(sorted({f"{machine.count} {machine.accelerator}" for machine in machines}))
        raise ProviderRefused(
            f"region {spec.region} offers {offered}, not {max(1, spec.gpus)} {wanted}",
            code="accelerator_not_offered",
            permanent=True,
        )
    return sorted(fits, key=lambda machine: machine.price_per_hour)


def choose(
    machines: Iterable[AwsMachine],
    subnets: Sequence[str],
    tried: Sequence[Place],
    full_types: frozenset[str],
    cool: CoolDowns,
    now: float,
) -> Place | None:
    """The next place to try: of a type in all zones, then the next type. None where there is none.

    A type in `full_types` is one that the account may not have more of.
    """
    for machine in machines:
        for subnet in subnets:
            place = Place(machine.type, subnet)
            if place not in tried and machine.type not in full_types and not cool.cold(place, now):
                return place
    return None


def first_intent(spec: ReplicaSpec, place: Place, epoch: int, settings: AwsSettings, **told: Any) -> Intent:
    """`told` is what the instance is told beside the spec: names, and no secrets."""
    nonce = secrets.token_hex(6)
    order = {"spec": asdict(spec), "port": settings.port, "home": settings.node_home, **told}
    order |= {"region": settings.aws_region, "bucket": settings.bucket, "deadman_minutes": settings.deadman_minutes}
    tags = {
        "Name": f"ingle {spec.endpoint_name}",
        INSTALLATION: str(told["installation"]),
        REGION: spec.region,
        ENDPOINT: spec.endpoint_name,
        REPLICA: spec.replica_id,
        EPOCH: str(epoch),
    }
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    request: dict[str, Any] = {
        "LaunchTemplate": {"LaunchTemplateId": settings.launch_template},
        "MinCount": 1,
        "MaxCount": 1,
        # The template has these, too; here they hold whatever became of it.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "UserData": user_data(settings, order),
        "TagSpecifications": [{"ResourceType": kind, "Tags": listed} for kind in ("instance", "volume")],
    }
    if settings.spot:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    return _at(Intent(epoch, nonce, request), spec.replica_id, place, 1)


def next_intent(intent: Intent, replica_id: str, place: Place) -> Intent:
    """The same elsewhere, once it is known that there was no room."""
    tried = (*intent.tried, intent.place)
    return _at(Intent(intent.epoch, intent.nonce, intent.request, tried), replica_id, place, len(tried) + 1)


def user_data(settings: AwsSettings, order: Mapping[str, Any]) -> str:
    """The first boot's script. The machine powers off, and so ends, unless what it starts puts that off."""
    guest = shlex.join([settings.python, "-m", "control_plane.providers.aws_guest", json.dumps(order, sort_keys=True)])
    return f"#!/bin/bash\nshutdown -P +{settings.deadman_minutes}\n{guest}\nshutdown -P now\n"


def refusal(kind: Kind, reasons: Sequence[str]) -> ProviderRefused:
    """Why no place took it; the last reason tells."""
    why = reasons[-1] if reasons else "no place had room a while ago; they are asked again soon"
    return ProviderRefused(why, code=kind.value, permanent=kind in (Kind.DENIED, Kind.INVALID))


def _has(machine: AwsMachine, wanted: str) -> bool:
    return machine.accelerator == wanted or (wanted == "cuda" and machine.accelerator != "cpu")


def _at(intent: Intent, replica_id: str, place: Place, number: int) -> Intent:
    asked = {
        "InstanceType": place.type,
        "SubnetId": place.subnet,
        "ClientToken": f"{replica_id}-{intent.nonce}-{number}",
    }
    return Intent(intent.epoch, intent.nonce, {**intent.request, **asked}, intent.tried)
