"""One look at all of a region's instances and their reports, shared by everybody who asks within a moment."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.domain import Description, Phase, Weights
from control_plane.providers.aws_calls import AwsCalls
from control_plane.providers.aws_launch import INSTALLATION, REGION, REPLICA
from control_plane.providers.aws_marks import ALIVE, CONTROLLER, LIVE, REPORTS, Marks

_MOST = 10_000
_GONE = frozenset({"shutting-down", "terminated"})
_UP = frozenset({"pending", "running"})
_ZONE = re.compile(r"[a-z]{2}(?:-[a-z]+)+-[0-9]{1,2}")


@dataclass(frozen=True, slots=True)
class Instance:
    """`launched` is in seconds since the epoch, `reason` is EC2's code and `message` its words, of one that ended."""

    id: str
    replica_id: str
    state: str
    address: str | None
    launched: float
    zone: str = ""
    reason: str = ""
    message: str = ""

    @property
    def up(self) -> bool:
        return self.state in _UP

    @property
    def to_end(self) -> bool:
        return self.state not in _GONE


@dataclass(frozen=True, slots=True)
class Sight:
    instances: Mapping[str, Sequence[Instance]] = field(default_factory=dict)
    reports: Mapping[str, str] = field(default_factory=dict)
    """Their versions."""


@dataclass(frozen=True, slots=True)
class Report:
    """What instance `instance` said of its replica; its address is EC2's to say."""

    instance: str
    found: Description


UNSAID = Report("", Description(Phase.STARTING))


class Watch:
    """`fresh` is how long a look counts, `beat` how often the instances hear that a controller lives; seconds."""

    def __init__(
        self, calls: AwsCalls, marks: Marks, installation: str, region: str, *, public: bool, fresh: float, beat: float
    ) -> None:
        self._calls = calls
        self._marks = marks
        self._filters = [
            {"Name": f"tag:{INSTALLATION}", "Values": [installation]},
            {"Name": f"tag:{REGION}", "Values": [region]},
        ]
        self._public = public
        self._fresh = fresh
        self._beat = beat
        self._beaten_at = float("-inf")
        self._looking = asyncio.Lock()
        self._sight = Sight()
        self._looked_at = float("-inf")
        self._said: dict[str, tuple[str, Report]] = {}

    async def look(self) -> Sight:
        """Raises AwsFault."""
        async with self._looking:
            if time.monotonic() - self._looked_at > self._fresh:
                began = time.monotonic()
                instances, reports = await asyncio.gather(self.instances(), self._marks.listed(REPORTS))
                self._sight = Sight(instances, {name: version for name, (version, _) in reports.items()})
                self._said = {name: said for name, said in self._said.items() if name in reports}
                self._looked_at = began
                await self._say_alive()
            return self._sight

    def again(self) -> None:
        """Something changed: the next look is a new one."""
        self._looked_at = float("-inf")

    async def instances(self, replica_id: str | None = None) -> dict[str, list[Instance]]:
        """By replica, as EC2 has them now: of one replica, or all. Raises AwsFault."""
        filters = [*self._filters]
        if replica_id is not None:
            filters.append({"Name": f"tag:{REPLICA}", "Values": [replica_id]})
        pages = await self._calls.pages("ec2", "describe_instances", "Reservations", _MOST, Filters=filters)
        found: dict[str, list[Instance]] = {}
        for raw in (raw for page in pages for raw in page["Instances"]):
            instance = self._instance(raw)
            found.setdefault(instance.replica_id, []).append(instance)
        return found

    async def report(self, sight: Sight, replica_id: str) -> Report:
        """What the replica's instance said last. Raises AwsFault."""
        version = sight.reports.get(replica_id)
        if version is None:
            return UNSAID
        known = self._said.get(replica_id)
        if known is None or known[0] != version:
            mark = await self._marks.get(REPORTS, replica_id)
            known = self._said[replica_id] = (mark.version, report_of(mark.body)) if mark else (version, UNSAID)
        return known[1]

    async def owned(self, grace: float) -> list[str]:
        """Ids of replicas of which anything is left that is older than `grace` seconds. Raises AwsFault."""
        sight, live = await asyncio.gather(self.look(), self._marks.listed(LIVE))
        now = time.time()
        since = {name: written.timestamp() for name, (_, written) in live.items()}
        for replica_id, instances in sight.instances.items():
            if any(instance.state != "terminated" for instance in instances):
                since[replica_id] = min(instance.launched for instance in instances)
        return sorted(replica_id for replica_id, at in since.items() if now - at >= grace)

    async def _say_alive(self) -> None:
        if time.monotonic() - self._beaten_at > self._beat:
            await self._marks.put(ALIVE, CONTROLLER, os.urandom(8).hex().encode())
            self._beaten_at = time.monotonic()

    def _instance(self, raw: Mapping[str, Any]) -> Instance:
        tags = {tag["Key"]: tag["Value"] for tag in raw.get("Tags", ())}
        reason = raw.get("StateReason") or {}
        address = raw.get("PublicIpAddress" if self._public else "PrivateIpAddress")
        return Instance(
            id=str(raw["InstanceId"]),
            replica_id=str(tags.get(REPLICA, "")),
            state=str(raw["State"]["Name"]),
            address=str(address) if address else None,
            launched=raw["LaunchTime"].timestamp(),
            zone=str((raw.get("Placement") or {}).get("AvailabilityZone") or ""),
            reason=str(reason.get("Code", "")),
            message=str(reason.get("Message", ""))[:300],
        )


def region_of(zone: str) -> str:
    """The region of AWS that a zone is in, one at its edge too: `us-west-2a`, `us-west-2-lax-1a`."""
    found = _ZONE.match(zone)
    return found[0] if found else ""


def _weights(said: Mapping[str, Any]) -> Weights:
    region = said.get("region")
    return Weights(str(said["source"])[:1000], None if region is None else str(region)[:32])


def report_of(body: bytes) -> Report:
    """Nothing said, where it can't be read. An instance isn't trusted to say where it is, nor that it costs nothing."""
    try:
        said = json.loads(body)
        phase = Phase(said["phase"])
        took, weights = said.get("startup_ms"), said.get("weights")
        return Report(
            str(said["instance"]),
            Description(
                Phase.STARTING if phase is Phase.ABSENT else phase,
                startup_ms=None if took is None else float(took),
                phases={str(name)[:64]: float(took) for name, took in list(said["phases"].items())[:32]},
                code=str(said["code"])[:64] if said.get("code") else None,
                message=str(said.get("message") or "")[:1000],
                weights=None if weights is None else _weights(weights),
            ),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return UNSAID
