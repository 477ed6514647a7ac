"""Operations on tenants and API keys."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.api import schemas, views
from control_plane.api.operations import PAGED, Answer, Call, Operation, Page, Parameter, limit_of
from control_plane.domain import KeyScope, Quota, Role
from control_plane.errors import Conflict
from control_plane.security.keys import make_key
from control_plane.security.secret import Secret
from control_plane.store import tenants
from control_plane.store.database import Store
from control_plane.store.models import ApiKeyRow

_SCOPE = ("endpoints", "routes", "networks")


class AccountOperations:
    def __init__(self, store: Store, secret: Secret) -> None:
        self._store = store
        self._secret = secret

    def table(self) -> list[Operation]:
        keys = "/admin/v1/keys"
        return [
            Operation("createTenant", "POST", "/admin/v1/tenants", Role.OWNER, "Create a tenant", self.create_tenant,
                      schemas.Tenant, schemas.TenantCreate, status=201, idempotent=True),
            Operation("listTenants", "GET", "/admin/v1/tenants", Role.VIEWER, "List tenants by name",
                      self.list_tenants, schemas.Tenant, is_list=True, parameters=PAGED),
            Operation("limitTenant", "PATCH", "/admin/v1/tenants/{name}", Role.OPERATOR, "Change a tenant's limits",
                      self.limit_tenant, schemas.Tenant, schemas.TenantLimits),
            Operation("showTenant", "GET", "/admin/v1/tenants/{name}", Role.VIEWER, "Show a tenant",
                      self.show_tenant, schemas.Tenant),
            Operation("createKey", "POST", keys, Role.OPERATOR, "Create an API key; its secret is shown this once",
                      self.create_key, schemas.NewKey, schemas.KeyCreate, status=201, idempotent=True),
            Operation("listKeys", "GET", keys, Role.VIEWER, "List API keys", self.list_keys, schemas.Key,
                      is_list=True, parameters=(*PAGED, Parameter("tenant", "only this tenant's"))),
            Operation("updateKey", "PATCH", f"{keys}/{{id}}", Role.OPERATOR, "Change a key's limits and scope",
                      self.update_key, schemas.Key, schemas.KeyUpdate),
            Operation("rotateKey", "POST", f"{keys}/{{id}}/rotate", Role.OPERATOR,
                      "Replace a key; the old one works for a while longer", self.rotate_key, schemas.NewKey,
                      schemas.KeyRotate, status=201),
            Operation("revokeKey", "DELETE", f"{keys}/{{id}}", Role.OPERATOR, "Revoke a key at once",
                      self.revoke_key, schemas.Key),
        ]  # fmt: skip

    async def create_tenant(self, call: Call) -> Answer:
        asked: schemas.TenantCreate = call.body
        async with self._store.write() as session:
            again = await call.once.repeated(session)
            if again is not None:
                return Answer(schemas.Tenant.model_validate(again), 201)
            view = views.tenant(await tenants.create_tenant(session, asked.name, call.now))
            await call.audit(session, "tenant.create", asked.name)
            call.once.remember(session, 201, view.model_dump())
            return Answer(view, 201)

    async def list_tenants(self, call: Call) -> Page:
        limit = limit_of(call.query)
        async with self._store.read() as session:
            rows = await tenants.list_tenants(session, after=call.query.get("after", ""), limit=limit)
        return Page([views.tenant(row) for row in rows], rows[-1].name if len(rows) == limit else None)

    async def show_tenant(self, call: Call) -> Answer:
        async with self._store.read() as session:
            return Answer(views.tenant(await tenants.get_tenant(session, call.path["name"])))

    async def limit_tenant(self, call: Call) -> Answer:
        changes = {name: getattr(call.body, name) for name in call.given}
        async with self._store.write() as session:
            row = await tenants.get_tenant(session, call.path["name"])
            await tenants.change(session, row, changes)
            await call.audit(session, "tenant.limits", row.name, **changes)
            return Answer(views.tenant(row))

    async def update_key(self, call: Call) -> Answer:
        changes = {name: getattr(call.body, name) for name in call.given}
        async with self._store.write() as session:
            row = await tenants.get_key(session, call.path["id"])
            await tenants.change(session, row, changes)
            await call.audit(session, "key.update", row.id, **changes)
            return Answer(views.key(row, await _tenant_names(session), call.now))

    async def create_key(self, call: Call) -> Answer:
        asked: schemas.KeyCreate = call.body
        async with self._store.write() as session:
            again = await call.once.repeated(session)
            if again is not None:
                raise Conflict(
                    f"that request made key {again['id']}, whose secret was shown once: rotate it for another",
                    code="already_created",
                )
            tenant = await tenants.get_tenant(session, asked.tenant)
            expires = None if asked.expires_in is None else call.now + asked.expires_in
            given = asked.model_dump()
            quota = Quota(**{name: given[name] for name in schemas.Limits.model_fields})
            scope = KeyScope(**{part: None if given[part] is None else tuple(given[part]) for part in _SCOPE})
            view = await self._new_key(session, tenant.id, asked.name, quota, scope, expires, call.now)
            await call.audit(session, "key.create", view.id, tenant=tenant.name, **asked.model_dump(exclude={"tenant"}))
            call.once.remember(session, 201, {"id": view.id})
            return Answer(view, 201)

    async def list_keys(self, call: Call) -> Page:
        limit = limit_of(call.query)
        async with self._store.read() as session:
            tenant = call.query.get("tenant")
            tenant_id = (await tenants.get_tenant(session, tenant)).id if tenant else None
            rows = await tenants.list_keys(session, tenant_id=tenant_id, after=call.query.get("after", ""), limit=limit)
            names = await _tenant_names(session)
        return Page([views.key(row, names, call.now) for row in rows], rows[-1].id if len(rows) == limit else None)

    async def rotate_key(self, call: Call) -> Answer:
        asked: schemas.KeyRotate = call.body
        async with self._store.write() as session:
            old = await tenants.get_key(session, call.path["id"])
            if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= call.now):
                raise Conflict(f"key {old.id} is revoked or expired: create a new one", code="key_ended")
            if old.rotated_to is not None:
                raise Conflict(f"key {old.id} was rotated to {old.rotated_to}: rotate that one", code="key_rotated")
            # The successor keeps the lifetime that the old key was given.
            lifetime = None if old.expires_at is None else old.expires_at - old.created_at
            expires = None if lifetime is None else call.now + lifetime
            view = await self._new_key(session, old.tenant_id, old.name, old.quota, old.scope, expires, call.now)
            await tenants.end_key_at(session, old, call.now + asked.grace_seconds, view.id)
            await call.audit(session, "key.rotate", old.id, successor=view.id, grace_seconds=asked.grace_seconds)
            return Answer(view, 201)

    async def revoke_key(self, call: Call) -> Answer:
        async with self._store.write() as session:
            row = await tenants.revoke_key(session, call.path["id"], call.now)
            await call.audit(session, "key.revoke", row.id)
            return Answer(views.key(row, await _tenant_names(session), call.now))

    async def _new_key(
        self,
        session: AsyncSession,
        tenant_id: str,
        name: str,
        quota: Quota,
        scope: KeyScope,
        expires_at: float | None,
        now: float,
    ) -> schemas.NewKey:
        made = make_key(self._secret)
        row: ApiKeyRow = await tenants.add_key(
            session,
            key_id=made.id,
            tenant_id=tenant_id,
            name=name,
            digest=made.digest,
            prefix=made.prefix,
            quota=quota,
            scope=scope,
            expires_at=expires_at,
            now=now,
        )
        shown = views.key(row, await _tenant_names(session), now)
        return schemas.NewKey(**shown.model_dump(), secret=made.text)


async def _tenant_names(session: AsyncSession) -> dict[str, str]:
    return {row.id: row.name for row in await tenants.list_tenants(session)}
