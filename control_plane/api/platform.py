"""Operations on the installation itself: regions, certificates, audit records."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from control_plane.api import schemas, views
from control_plane.api.operations import Answer, Call, Operation, Page, Parameter, limit_of, number_of
from control_plane.api.places import Places
from control_plane.chain import BEFORE_ALL, Verifier
from control_plane.domain import Role
from control_plane.errors import NotFound
from control_plane.security.audit import AuditSigner
from control_plane.security.certificates import CA, CertificateAuthority
from control_plane.store import audit, endpoints, traffic
from control_plane.store.database import Store

_AUDIT_PAGE = 500
_AUDIT_SECONDS = 60.0
_GATEWAY_SILENT_SECONDS = 20.0


class PlatformOperations:
    def __init__(
        self, store: Store, places: Places, authority: CertificateAuthority, signer: AuditSigner, version: str
    ) -> None:
        self._store = store
        self._signer = signer
        self._places = places
        self._authority = authority
        self._version = version

    def table(self) -> list[Operation]:
        certs = "/admin/v1/certs"
        return [
            Operation("showStatus", "GET", "/admin/v1/status", Role.VIEWER, "What this installation is", self.status,
                      schemas.Status),
            Operation("listRegions", "GET", "/admin/v1/regions", Role.VIEWER, "List regions", self.regions,
                      schemas.Region, is_list=True),
            Operation("showRegion", "GET", "/admin/v1/regions/{name}", Role.VIEWER, "Show a region", self.region,
                      schemas.Region),
            Operation("listCertificates", "GET", certs, Role.VIEWER, "List certificates", self.certificates,
                      schemas.Certificate, is_list=True),
            Operation("showCertificate", "GET", f"{certs}/{{name}}", Role.VIEWER, "Show a certificate",
                      self.certificate, schemas.Certificate),
            Operation("rotateCertificates", "POST", f"{certs}/rotate", Role.OPERATOR,
                      "Renew one server's certificate, or the gateways'", self.rotate, schemas.Certificate,
                      schemas.CertificateRotate, is_list=True),
            Operation("verifyAudit", "GET", "/admin/v1/audit/verify", Role.OWNER, "Walk along the chain of records",
                      self.verify_audit, schemas.AuditCheck,
                      parameters=(Parameter("head", "a head that an earlier check gave"),)),
            Operation("listAudit", "GET", "/admin/v1/audit", Role.OWNER, "Who changed what, newest first", self.audit,
                      schemas.Audit, is_list=True,
                      parameters=(Parameter("limit", "items on a page", "integer"),
                                  Parameter("after", "cursor of the page"))),
        ]  # fmt: skip

    async def status(self, call: Call) -> Answer:
        return Answer(
            schemas.Status(version=self._version, ca_file=str(self._authority.ca_file), regions=self._places.names)
        )

    async def regions(self, call: Call) -> Page:
        return Page(list(await self._regions(call.now)))

    async def region(self, call: Call) -> Answer:
        for region in await self._regions(call.now):
            if region.name == call.path["name"]:
                return Answer(region)
        raise NotFound(f"no region named {call.path['name']!r}: there are {', '.join(self._places.names)}")

    async def _regions(self, now: float) -> list[schemas.Region]:
        async with self._store.read() as session:
            urls = await self._places.urls(session)
            heard = await traffic.gateway_urls(session)
            counts: dict[str, int] = {}
            for endpoint in await endpoints.list_endpoints(session):
                counts[endpoint.region] = counts.get(endpoint.region, 0) + 1
        sights = await asyncio.gather(*(self._places.look(name) for name in self._places.names))
        return [
            schemas.Region(
                name=name,
                jurisdiction=self._places.jurisdiction(name),
                provider=self._places.provider(name),
                reachable=sight.reachable,
                trouble=sight.trouble,
                accelerators=dict(sight.accelerators),
                url=urls[name],
                gateway="up" if now - heard.get(name, ("", 0.0))[1] < _GATEWAY_SILENT_SECONDS else "silent",
                endpoints=counts.get(name, 0),
            )
            for name, sight in zip(self._places.names, sights, strict=True)
        ]

    async def certificates(self, call: Call) -> Page:
        found = await asyncio.to_thread(self._authority.list)
        return Page([views.certificate(item, call.now) for item in found])

    async def certificate(self, call: Call) -> Answer:
        found = await asyncio.to_thread(self._authority.show, call.path["name"])
        return Answer(views.certificate(found, call.now))

    async def rotate(self, call: Call) -> Page:
        asked: schemas.CertificateRotate = call.body
        if asked.name == CA:
            rolled = await asyncio.to_thread(self._authority.roll_over, call.now)
            async with self._store.write() as session:
                await call.audit(session, "cert.rotate", CA)
            return Page([views.certificate(rolled, call.now)])
        known = [item.name for item in await asyncio.to_thread(self._authority.list)]
        names = [asked.name] if asked.name else [name for name in known if name.startswith("gateway-")]
        renewed = [await asyncio.to_thread(self._authority.renew, name, call.now) for name in names]
        async with self._store.write() as session:
            await call.audit(session, "cert.rotate", ", ".join(names))
        return Page([views.certificate(item, call.now) for item in renewed])

    async def verify_audit(self, call: Call) -> Answer:
        verifier = Verifier(self._signer.signed, call.query.get("head", BEFORE_ALL))
        after = 0
        async with self._store.read(_AUDIT_SECONDS) as session:
            # Records that are appended from now on are beyond `length`, and fine to see.
            length = await audit.chain_length(session)
            while page := await audit.chain(session, after=after, limit=_AUDIT_PAGE):
                await asyncio.to_thread(verifier.take, [record for _, record in page])
                after = page[-1][0]
        verifier.end(length)
        return Answer(
            schemas.AuditCheck(
                intact=not verifier.faults,
                records=verifier.count,
                seq=verifier.seq,
                head=verifier.head,
                faults=[schemas.AuditFault.model_validate(asdict(fault)) for fault in verifier.faults],
                public_key=self._signer.public_key,
            )
        )

    async def audit(self, call: Call) -> Page:
        limit = limit_of(call.query)
        after = call.query.get("after")
        before = None if after is None else int(number_of(call.query, "after", 0, 0, 2**53))
        async with self._store.read() as session:
            rows = await audit.list_audit(session, before=before, limit=limit)
        return Page([views.audit(row) for row in rows], str(rows[-1].id) if len(rows) == limit else None)
