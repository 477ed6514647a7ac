"""The AWS provider: a replica is an EC2 instance that ends by powering off, and does so when nobody speaks to it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_plane.domain import Address, Description, Kept, Offer, Phase, ReplicaSpec
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.observe import metrics
from control_plane.provider_settings import AwsMachine, AwsSettings
from control_plane.providers.aws_calls import PAUSE_SECONDS, AwsCalls
from control_plane.providers.aws_errors import AwsFault, Kind, reason_of
from control_plane.providers.aws_launch import CoolDowns, Intent, choose, first_intent, fitting, next_intent, refusal
from control_plane.providers.aws_marks import ENDED, LIVE, LOGS, REPORTS, STARTED, Marks
from control_plane.providers.aws_residence import Residence
from control_plane.providers.aws_sight import Instance, Report, Watch, region_of
from control_plane.providers.draining import ask_to_drain
from control_plane.providers.last_logs import tail
from control_plane.providers.local import Tokens
from control_plane.section import arn_region
from control_plane.security.files import private_folder
from control_plane.security.mesh import PLAIN, Mesh, server_name

_FRESH_SECONDS = 1.0
_BEAT_SECONDS = 30.0
_WORD_SECONDS = 5.0
_MOST_REMEMBERED = 4096


class AwsProvider:
    """Implements `Provider` with instances of one region of AWS, which is `region` here.

    `installation` is in the tags of all that is ours, `home` the control plane's, `terminate_grace` in seconds, and
    `log_bytes` bounds each of a replica's two log files, `variables` are set for replicas. An instance looks every
    `word` seconds for what it is told. For `fresh`, `beat` and `pause` see `Watch` and `AwsCalls`.
    """

    def __init__(
        self,
        region: str,
        settings: AwsSettings,
        secret: Tokens,
        *,
        installation: str,
        home: Path,
        command: Sequence[str],
        terminate_grace: float,
        log_bytes: int,
        mesh: Mesh | None = None,
        variables: Mapping[str, str] | None = None,
        fresh: float = _FRESH_SECONDS,
        beat: float = _BEAT_SECONDS,
        word: float = _WORD_SECONDS,
        pause: float = PAUSE_SECONDS,
    ) -> None:
        self._region = region
        self._settings = settings
        self._secret = secret
        self._installation = installation
        self._pairs = private_folder(home / "aws")
        self._told: dict[str, Any] = {
            "installation": installation,
            "command": [settings.python if given == sys.executable else given for given in command],
            "grace": terminate_grace,
            "log_bytes": log_bytes,
            "word_seconds": word,
            "variables": dict(variables or {}),
        }
        self._mesh = mesh
        self._link = mesh.link if mesh else PLAIN
        self._calls = AwsCalls(settings.aws_region, settings.endpoint_url, pause=pause)
        self._residence = Residence(self._calls, settings.bucket)
        self._marks = Marks(self._calls, settings.bucket, installation)
        self._watch = Watch(
            self._calls,
            self._marks,
            installation,
            region,
            public=settings.address == "public",
            fresh=fresh,
            beat=beat,
        )
        self._cool = CoolDowns(settings.cool_down)
        self._sent: dict[str, str] = {}
        self._ended: dict[str, None] = {}

    async def offers(self) -> Sequence[Offer]:
        await self._residence.require()
        await self._calls.call("ec2", "describe_subnets", SubnetIds=list(self._settings.subnets))
        most: dict[str, tuple[int, float]] = {}
        for machine in self._settings.machines:
            count, price = most.get(machine.accelerator, (0, float("inf")))
            most[machine.accelerator] = (max(count, machine.count), min(price, machine.price_per_hour))
        return [Offer(self._region, kind, count, price, fixed=True) for kind, (count, price) in sorted(most.items())]

    async def ensure(self, spec: ReplicaSpec) -> None:
        try:
            await self._ensure(spec)
        except AwsFault as fault:
            if fault.kind is Kind.DENIED:
                raise refusal(fault.kind, [fault.message]) from None
            raise
        except ProviderRefused as refused:
            if refused.code == Kind.QUOTA:
                metrics.quota_refusals.labels(self._region).inc()
            raise
        finally:
            self._watch.again()

    async def describe(self, replica_id: str) -> Description:
        sight = await self._watch.look()
        instances = sight.instances.get(replica_id, ())
        if not instances:
            age = await self._marks.age(LIVE, replica_id)
            young = age is not None and age < self._settings.settle_seconds
            return Description(Phase.STARTING if young else Phase.ABSENT)
        said = await self._watch.report(sight, replica_id)
        found = self._description(instances, said)
        if found.phase is Phase.RUNNING and self._mesh is not None:
            await self._renew(replica_id)
        return found

    async def list_owned(self) -> Sequence[str]:
        return await self._watch.owned(self._settings.reap_grace)

    async def drain(self, replica_id: str) -> None:
        found = await self.describe(replica_id)
        if found.phase is Phase.RUNNING and found.address is not None:
            await ask_to_drain(self._link, replica_id, found.address, self._secret.replica_token(replica_id))

    async def terminate(self, replica_id: str) -> None:
        if replica_id not in self._ended:
            await self._marks.put(ENDED, replica_id, b"")
        instances = (await self._watch.instances(replica_id)).get(replica_id, [])
        ids = [instance.id for instance in instances if instance.to_end]
        if ids:
            await self._calls.call("ec2", "terminate_instances", InstanceIds=ids)
            self._watch.again()
        if replica_id not in self._ended:
            await self._clear(replica_id)
            age = await self._marks.age(LIVE, replica_id)
            if instances or age is None or age >= self._settings.settle_seconds:
                # Otherwise one that was just asked for may come to be seen yet.
                await self._marks.delete(LIVE, replica_id)
                self._remember_end(replica_id)

    async def logs(self, replica_id: str, lines: int, after: int | None = None) -> tuple[list[str], int]:
        """What the replica logged, a moment ago, and the position to go on `after`, as of a local one."""
        mark = await self._marks.get(LOGS, replica_id)
        try:
            kept = json.loads(mark.body) if mark is not None else {}
            said, position = [str(line) for line in kept.get("lines", ())], int(kept.get("position", after or 0))
        except (ValueError, TypeError, AttributeError):
            raise ProviderError(f"what {replica_id} logged can't be read", code="logs_unreadable") from None
        return tail(said, position, lines, after), position

    async def kept(self, replica_id: str) -> Sequence[Kept]:
        """Where AWS says that its marks, logs and secrets are. Raises AwsFault, ProviderRefused."""
        bucket = f"s3://{self._settings.bucket}"
        found = [Kept("marks and logs", bucket, self._ours(await self._residence.bucket()))]
        try:
            secret = await self._calls.call("secretsmanager", "describe_secret", SecretId=self._name(replica_id))
        except AwsFault as fault:
            if fault.kind is Kind.MISSING:
                return found
            raise
        copies = [str(copy["Region"]) for copy in secret.get("ReplicationStatus", ())]
        places = [arn_region(str(secret["ARN"])), *copies]
        return [*found, *(Kept("secrets", "AWS Secrets Manager", self._ours(place)) for place in places)]

    async def close(self) -> None:
        """Let go of AWS. Replicas stay."""
        self._calls.close()

    async def _ensure(self, spec: ReplicaSpec) -> None:
        if spec.region != self._region:
            raise ProviderRefused(
                f"region {spec.region} isn't {self._region}, in {self._settings.aws_region}",
                code="unknown_region",
                permanent=True,
            )
        machines = fitting(spec, self._settings.machines)
        await self._residence.require()
        ended, started = await asyncio.gather(
            self._marks.has(ENDED, spec.replica_id), self._marks.has(STARTED, spec.replica_id)
        )
        if ended or started or spec.replica_id in await self._watch.instances(spec.replica_id):
            return
        intent, fresh = await self._intent(spec, machines)
        await self._keep_secret(spec.replica_id)
        await self._launch(spec, intent, fresh)
        # An end that came meanwhile looked before there was anything to be seen.
        if await self._marks.has(ENDED, spec.replica_id):
            await self.terminate(spec.replica_id)

    async def _intent(self, spec: ReplicaSpec, machines: Sequence[AwsMachine]) -> tuple[Intent, bool]:
        """What is to be asked of EC2, and whether nobody can have asked it yet.

        Raises ProviderRefused where no place is to be tried.
        """
        asked = await self._marks.get(LIVE, spec.replica_id)
        if asked is not None:
            return Intent.decode(asked.body), False
        place = choose(machines, self._settings.subnets, (), frozenset(), self._cool, time.monotonic())
        if place is None:
            raise refusal(Kind.CAPACITY, [])
        told = {**self._told, "secret": self._name(spec.replica_id)}
        mine = first_intent(spec, place, int(time.time()), self._settings, **told)
        found = Intent.decode(await self._marks.claim(LIVE, spec.replica_id, mine.encode()))
        return found, found == mine

    async def _launch(self, spec: ReplicaSpec, intent: Intent, fresh: bool) -> None:
        """Ask for the intent's instance, and elsewhere where there is no room. Raises ProviderRefused, AwsFault.

        A no that AWS doesn't give by token, as it does for want of room, is clear only to a `fresh` intent.
        """
        machines, subnets = fitting(spec, self._settings.machines), self._settings.subnets
        full_types: frozenset[str] = frozenset()
        kind, reasons = Kind.CAPACITY, list[str]()
        for _ in range(len(machines) * len(subnets) + 1):
            try:
                await self._calls.call("ec2", "run_instances", **intent.request)
                return
            except AwsFault as fault:
                if fault.kind in (Kind.DENIED, Kind.INVALID) and fresh and not fault.repeated:
                    await self._forget(spec.replica_id)
                    raise refusal(fault.kind, [fault.message]) from None
                if fault.kind not in (Kind.CAPACITY, Kind.QUOTA):
                    raise
                reasons.append(fault.message)
                if fault.kind is Kind.QUOTA:
                    kind = Kind.QUOTA
                    full_types |= {intent.place.type}
                else:
                    self._cool.note(intent.place, time.monotonic())
            tried = (*intent.tried, intent.place)
            place = choose(machines, subnets, tried, full_types, self._cool, time.monotonic())
            if place is None:
                break
            intent, fresh = (
                await self._move(spec.replica_id, intent, next_intent(intent, spec.replica_id, place)),
                False,
            )
        await self._forget(spec.replica_id)
        raise refusal(kind, reasons)

    async def _move(self, replica_id: str, from_: Intent, to: Intent) -> Intent:
        """Write down where it is asked for next, unless another controller did so first: then go where that went."""
        there = await self._marks.get(LIVE, replica_id)
        if there is None:
            raise ProviderError("it was ended meanwhile", code="conflict")
        if there.body != from_.encode():
            return Intent.decode(there.body)
        return Intent.decode(await self._marks.replace(LIVE, replica_id, there.version, to.encode()))

    def _description(self, instances: Sequence[Instance], said: Report) -> Description:
        up = [instance for instance in instances if instance.up]
        speaker = next((instance for instance in instances if instance.id == said.instance), None)
        instance = speaker or (up or list(instances))[0]
        if not up:
            over = all(instance.state == "terminated" for instance in instances)
            message = f"instance {instance.id} is {instance.state}: {instance.message or 'AWS says no reason'}"
            return Description(Phase.ABSENT if over else Phase.EXITED, code=reason_of(instance.reason), message=message)
        began = min(one.launched for one in up)
        where = self._region_of(instance)
        if instance.state != "running" or instance.address is None or speaker is None:
            return Description(Phase.STARTING, region=where, began_at=began)
        address = Address(instance.address, self._settings.port) if said.found.phase is Phase.RUNNING else None
        return replace(said.found, address=address, region=where, began_at=began)

    def _region_of(self, instance: Instance) -> str | None:
        """By its zone. None where AWS doesn't say."""
        return self._ours(region_of(instance.zone)) or None

    def _ours(self, where: str) -> str:
        """This region where it is that, or AWS's name of another one."""
        return self._region if where == self._settings.aws_region else where

    def _name(self, replica_id: str) -> str:
        return f"ingle/{self._installation}/{replica_id}"

    async def _keep_secret(self, replica_id: str) -> None:
        """What the replica's instance gets and nobody else: its token, its certificate, the authorities it trusts."""
        name, value = self._name(replica_id), await asyncio.to_thread(self._equipment, replica_id)
        key = {"KmsKeyId": self._settings.kms_key} if self._settings.kms_key else {}
        tags = [{"Key": "ingle:installation", "Value": self._installation}]
        try:
            answer = await self._calls.call(
                "secretsmanager", "create_secret", Name=name, SecretString=value, Tags=tags, **key
            )
        except AwsFault as fault:
            if fault.kind is not Kind.TAKEN:
                raise
            answer = await self._calls.call("secretsmanager", "put_secret_value", SecretId=name, SecretString=value)
        self._remember_sent(replica_id, value)
        try:
            self._residence.require_secret(answer)
        except ProviderRefused:
            await self._clear(replica_id)
            raise

    async def _renew(self, replica_id: str) -> None:
        value = await asyncio.to_thread(self._equipment, replica_id)
        if self._sent.get(replica_id) != value:
            name = self._name(replica_id)
            await self._calls.call("secretsmanager", "put_secret_value", SecretId=name, SecretString=value)
            self._remember_sent(replica_id, value)

    def _equipment(self, replica_id: str) -> str:
        found = {"token": self._secret.replica_token(replica_id), "pair": "", "authority": ""}
        if self._mesh is not None:
            path = self._pairs / f"{replica_id}.pem"
            # Callers ask for it by the replica's name: its address isn't known yet.
            self._mesh.equip(replica_id, server_name(replica_id), path)
            found |= {"pair": path.read_text(), "authority": self._mesh.ca_file.read_text()}
        return json.dumps(found)

    async def _forget(self, replica_id: str) -> None:
        """Of one that was refused, nothing stays."""
        await self._clear(replica_id)
        await self._marks.delete(LIVE, replica_id)

    async def _clear(self, replica_id: str) -> None:
        try:
            name = self._name(replica_id)
            await self._calls.call("secretsmanager", "delete_secret", SecretId=name, ForceDeleteWithoutRecovery=True)
        except AwsFault as fault:
            if fault.kind is not Kind.MISSING:
                raise
        await self._marks.delete(REPORTS, replica_id)
        self._sent.pop(replica_id, None)
        path = self._pairs / f"{replica_id}.pem"
        if self._mesh is not None:
            self._mesh.forget(path)
        await asyncio.to_thread(path.unlink, missing_ok=True)

    def _remember_end(self, replica_id: str) -> None:
        """Calls that come again are cheap for the ones that ended last."""
        self._ended[replica_id] = None
        if len(self._ended) > _MOST_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _remember_sent(self, replica_id: str, value: str) -> None:
        self._sent[replica_id] = value
        if len(self._sent) > _MOST_REMEMBERED:
            del self._sent[next(iter(self._sent))]
