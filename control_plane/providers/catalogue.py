"""The regions of an installation, and the provider of each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TypeAlias

from control_plane.config import Settings
from control_plane.domain import Description, Kept, Offer
from control_plane.errors import ConfigError, IngleError
from control_plane.observe import metrics
from control_plane.observe.exports import Export
from control_plane.provider_settings import AwsSettings, KubernetesSettings, RaySettings
from control_plane.providers.aws import AwsProvider
from control_plane.providers.base import Provider
from control_plane.providers.kubernetes import KubernetesProvider
from control_plane.providers.local import LocalProvider, Tokens
from control_plane.providers.ray import RayProvider, Spot
from control_plane.providers.ray_link import RayLink
from control_plane.security.mesh import Mesh
from control_plane.security.secret import Secret

Variables: TypeAlias = Mapping[str, Mapping[str, str]]
"""Of replicas' environments, by region."""


class Providers:
    """`by_region` is what a reconciler works with; regions of one cluster or machine share a provider."""

    def __init__(self, by_region: Mapping[str, Provider]) -> None:
        self.by_region = dict(by_region)

    async def offers(self, region: str) -> Sequence[Offer]:
        """What the region can start now. Raises ProviderError where that can't be asked."""
        return [offer for offer in await self.by_region[region].offers() if offer.region == region]

    async def describe(self, region: str, replica_id: str) -> Description:
        """What the region's provider says of a replica. Raises ProviderError; KeyError for a region that is gone."""
        return await self.by_region[region].describe(replica_id)

    async def kept(self, region: str, replica_id: str) -> Sequence[Kept]:
        """Where the region's provider keeps what is a replica's own. Raises ProviderError; KeyError as `describe`."""
        provider = self.by_region[region]
        if isinstance(provider, AwsProvider):
            return await provider.kept(replica_id)
        places = {
            LocalProvider: "the control plane's machine",
            RayProvider: "its node",
            KubernetesProvider: "its cluster",
        }
        return [Kept("secrets", place, region) for kind, place in places.items() if isinstance(provider, kind)]

    async def logs(self, region: str, replica_id: str, lines: int, after: int | None) -> tuple[list[str], int]:
        """What a replica logged and the position to go on after; nothing where its region is gone or silent."""
        provider = self.by_region.get(region)
        try:
            if isinstance(provider, LocalProvider):
                return await asyncio.to_thread(provider.logs, replica_id, lines, after)
            if isinstance(provider, RayProvider | AwsProvider | KubernetesProvider):
                return await provider.logs(replica_id, lines, after)
        except IngleError:
            pass
        return [], after or 0

    async def close(self) -> None:
        """Let go of clusters. Replicas stay."""
        for provider in set(self.by_region.values()):
            if isinstance(provider, RayProvider | AwsProvider | KubernetesProvider):
                await provider.close()


def open_providers(settings: Settings, secret: Secret, mesh: Mesh | None, exports: Mapping[str, Export]) -> Providers:
    """Nothing is connected yet. Raises ConfigError where a region's provider can't be used here."""
    variables = {region: export.variables for region, export in exports.items()}
    for region in settings.regions:
        metrics.quota_refusals.labels(region.name)  # begins at 0, so that the first one is seen
    found: dict[str, Provider] = {}
    local = [region.name for region in settings.regions if region.provider == "local"]
    if local:
        found |= dict.fromkeys(local, _local(settings, secret, mesh, local, variables))
    clusters: dict[tuple[object, ...], dict[str, RaySettings]] = {}
    for region in settings.regions:
        if region.ray is not None:
            cluster = (region.ray.address, region.ray.token_file, region.ray.node_home)
            clusters.setdefault(cluster, {})[region.name] = region.ray
    for regions in clusters.values():
        found |= dict.fromkeys(regions, _ray(settings, secret, mesh, regions, variables))
    for region in settings.regions:
        if region.aws is not None:
            found[region.name] = _aws(settings, secret, mesh, region.name, region.aws, variables)
    pods: dict[tuple[object, ...], dict[str, KubernetesSettings]] = {}
    for region in settings.regions:
        if region.kubernetes is not None:
            place = (region.kubernetes.kubeconfig, region.kubernetes.context, region.kubernetes.namespace)
            pods.setdefault(place, {})[region.name] = region.kubernetes
    for theirs in pods.values():
        found |= dict.fromkeys(theirs, _kubernetes(settings, secret, mesh, theirs, variables))
    return Providers(found)


def _local(
    settings: Settings, secret: Secret, mesh: Mesh | None, regions: Sequence[str], variables: Variables
) -> LocalProvider:
    return LocalProvider(
        settings.home,
        secret,
        regions=regions,
        command=settings.replica_command,
        terminate_grace=settings.timing.terminate_grace,
        log_bytes=settings.replica_log_bytes,
        mesh=mesh,
        variables=variables,
    )


def _ray(
    settings: Settings, secret: Secret, mesh: Mesh | None, regions: Mapping[str, RaySettings], variables: Variables
) -> RayProvider:
    first, cluster = next(iter(regions.items()))
    if find_spec("ray") is None:
        raise ConfigError(f"region {first}: ray isn't installed: pip install 'ingle[ray]'", param="regions")
    if not cluster.token_file.is_file():
        raise ConfigError(f"region {first}: ray.token_file {cluster.token_file} isn't there", param="regions")
    under_a_law = {region.name for region in settings.regions if region.jurisdiction is not None}
    return RayProvider(
        RayLink(cluster.address, installation_name(secret), cluster.token_file),
        secret,
        home=settings.home,
        node_home=cluster.node_home,
        spots={
            # what is logged under a law stays where that holds
            name: Spot(own.label, own.value or name, own.cpus, own.queue_seconds, name not in under_a_law)
            for name, own in regions.items()
        },
        command=settings.replica_command,
        terminate_grace=settings.timing.terminate_grace,
        log_bytes=settings.replica_log_bytes,
        mesh=mesh,
        variables=variables,
    )


def _aws(
    settings: Settings, secret: Secret, mesh: Mesh | None, region: str, own: AwsSettings, variables: Variables
) -> AwsProvider:
    if find_spec("boto3") is None:
        raise ConfigError(f"region {region}: boto3 isn't installed: pip install 'ingle[aws]'", param="regions")
    return AwsProvider(
        region,
        own,
        secret,
        installation=installation_name(secret),
        home=settings.home,
        command=settings.replica_command,
        terminate_grace=settings.timing.terminate_grace,
        log_bytes=settings.replica_log_bytes,
        mesh=mesh,
        variables=variables.get(region),
    )


def _kubernetes(
    settings: Settings,
    secret: Secret,
    mesh: Mesh | None,
    regions: Mapping[str, KubernetesSettings],
    variables: Variables,
) -> KubernetesProvider:
    if find_spec("kubernetes_asyncio") is None:
        first = next(iter(regions))
        message = f"region {first}: kubernetes_asyncio isn't installed: pip install 'ingle[kubernetes]'"
        raise ConfigError(message, param="regions")
    return KubernetesProvider(
        regions,
        secret,
        installation=installation_name(secret),
        grace=settings.timing.drain_timeout,
        mesh=mesh,
        variables=variables,
    )


def installation_name(secret: Tokens) -> str:
    """Two installations in one cluster or account must not take one another's replicas for orphans."""
    return f"ingle-{secret.replica_token('namespace')[:16]}"
