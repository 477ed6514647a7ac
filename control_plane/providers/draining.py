"""How a replica is asked to finish what it has: `POST /drain` with its token, over the installation's link."""

from __future__ import annotations

import aiohttp

from control_plane.domain import Address
from control_plane.errors import ProviderError
from control_plane.security.mesh import Link

_TIMEOUT = aiohttp.ClientTimeout(total=5)


async def ask_to_drain(link: Link, replica_id: str, address: Address, token: str) -> None:
    """Raises ProviderError where the replica refuses or can't be reached."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.post(link.url(address, "/drain"), headers=headers, **link.options(replica_id)) as response,
        ):
            if response.status >= 400:
                raise ProviderError(f"drain was answered with {response.status}", code="drain_failed")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ProviderError(f"drain failed ({type(error).__name__})", code="drain_failed") from error
