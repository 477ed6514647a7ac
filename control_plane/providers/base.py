"""What a provider must do. Six verbs, each safe to repeat, each about one replica id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from control_plane.domain import Description, Offer, ReplicaSpec


class Provider(Protocol):
    """Runs replicas somewhere.

    Every verb may be called again after a crash or a time-out, by this process or the next one, and then has the
    same outcome: a replica id is started at most once, ever.
    """

    async def offers(self) -> Sequence[Offer]:
        """What can be started, and where."""

    async def ensure(self, spec: ReplicaSpec) -> None:
        """Start the replica if it never was.

        Raises ProviderRefused when nothing was created and it is known, with code `unknown_region`,
        `accelerator_not_offered` or `no_capacity`; ProviderError when that isn't known.
        """

    async def describe(self, replica_id: str) -> Description:
        """How the replica is, where it runs and since when. ABSENT means that nothing of it runs or costs money.

        The region is what the provider sees, not what it was asked for: of a node's label, of an instance's zone.
        Raises ProviderError where that can't be known now: then the replica is as it was seen last.
        """

    async def list_owned(self) -> Sequence[str]:
        """Ids of all replicas of this installation that aren't ABSENT, whether or not a database knows them."""

    async def drain(self, replica_id: str) -> None:
        """Ask the replica to finish what it has and take nothing new."""

    async def terminate(self, replica_id: str) -> None:
        """Begin or continue to end the replica; `describe` says ABSENT once it is gone. Doesn't wait for that."""


def stage_flags(spec: ReplicaSpec) -> tuple[str, ...]:
    """What the engine is told where a replica has several accelerators: its layers go over them."""
    return ("--stages", str(spec.gpus)) if spec.gpus > 1 else ()
