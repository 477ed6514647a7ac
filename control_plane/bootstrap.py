"""What a new installation needs before anybody can use it: a tenant, an admin token in the profile, a first key."""

from __future__ import annotations

import time

from control_plane.app import Platform
from control_plane.domain import Role
from control_plane.errors import ConfigError, NotFound
from control_plane.profile import Profile, read_profile
from control_plane.security.files import write_private
from control_plane.security.keys import make_admin_token, make_key
from control_plane.store import tenants

DEFAULT_TENANT = "default"


async def bootstrap(platform: Platform, admin_url: str, *, first_key: bool) -> str | None:
    """Write the profile of this installation. Returns the first API key's text where it was made just now."""
    path = platform.settings.home / "profile.toml"
    now = time.time()
    try:
        token = read_profile(path).token
    except ConfigError:
        token = ""
    made = None
    async with platform.store.write() as session:
        try:
            tenant = await tenants.get_tenant(session, DEFAULT_TENANT)
        except NotFound:
            tenant = await tenants.create_tenant(session, DEFAULT_TENANT, now)
        if not token or await tenants.find_admin_token(session, platform.secret.admin_hash(token)) is None:
            token, digest = make_admin_token(platform.secret)
            await tenants.add_admin_token(session, "profile", digest, Role.OWNER, now)
        if first_key and not await tenants.list_keys(session, limit=1):
            made = make_key(platform.secret)
            await tenants.add_key(
                session,
                key_id=made.id,
                tenant_id=tenant.id,
                name="first-run",
                digest=made.digest,
                prefix=made.prefix,
                expires_at=None,
                now=now,
            )
    profile = Profile(admin_url, token, str(platform.authority.ca_file))
    write_private(path, profile.to_toml())
    return made.text if made else None
