"""How an ACME authority is shown that a name is ours: a file that it fetches, or a record that it looks up."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from control_plane.errors import Unavailable
from control_plane.security.files import private_folder, write_private

_TTL = 60
_POLL_SECONDS = 2.0
_MOST_POLLS = 60


class AcmeError(Unavailable):
    default_code = "acme_failed"


class Solver(Protocol):
    """`kind` is the challenge's type. `shown` has the proof in place as long as its block runs. Both may block."""

    kind: str

    def shown(self, name: str, token: str, proof: str) -> Any:
        """A context in which the authority finds `proof` for `name`. Raises AcmeError."""


class FileSolver:
    """HTTP-01: the proof is a file in `folder`, from where it must be served."""

    kind = "http-01"

    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder)

    @contextmanager
    def shown(self, name: str, token: str, proof: str) -> Iterator[None]:
        if not token.replace("-", "").replace("_", "").isalnum():
            raise AcmeError("the ACME authority's challenge has a strange token")
        answer = self.folder / token
        write_private(answer, proof.encode())
        try:
            yield
        finally:
            answer.unlink(missing_ok=True)


class Route53Solver:
    """DNS-01: the proof's digest is a TXT record in a hosted zone of Route 53. `client` is boto3's.

    `zone` is the zone's id; where none is given, the one with the longest name that fits. `poll` is in seconds.
    """

    kind = "dns-01"

    def __init__(self, client: Any, zone: str | None = None, *, poll: float = _POLL_SECONDS) -> None:
        self._client = client
        self._zone = zone
        self._poll = poll

    @contextmanager
    def shown(self, name: str, token: str, proof: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        digest = base64.urlsafe_b64encode(hashlib.sha256(proof.encode()).digest()).rstrip(b"=").decode()
        record = {
            "Name": f"_acme-challenge.{name}.",
            "Type": "TXT",
            "TTL": _TTL,
            "ResourceRecords": [{"Value": f'"{digest}"'}],
        }
        try:
            zone = self._zone or self._zone_of(name)
            self._change(zone, "UPSERT", record)
        except (BotoCoreError, ClientError) as error:
            raise AcmeError(f"Route 53 took no record for {name} ({_reason(error)})") from None
        try:
            yield
        finally:
            try:
                self._change(zone, "DELETE", record, wait=False)
            except (BotoCoreError, ClientError) as error:
                raise AcmeError(f"Route 53 kept the record for {name} ({_reason(error)})") from None

    def _change(self, zone: str, action: str, record: dict[str, Any], *, wait: bool = True) -> None:
        batch = {"Changes": [{"Action": action, "ResourceRecordSet": record}]}
        change = self._client.change_resource_record_sets(HostedZoneId=zone, ChangeBatch=batch)["ChangeInfo"]
        for _ in range(_MOST_POLLS):
            if not wait or change["Status"] == "INSYNC":
                return
            time.sleep(self._poll)
            change = self._client.get_change(Id=change["Id"])["ChangeInfo"]
        raise AcmeError("Route 53 took too long to publish a record")

    def _zone_of(self, name: str) -> str:
        found: list[tuple[int, str]] = []
        for page in self._client.get_paginator("list_hosted_zones").paginate():
            for zone in page["HostedZones"]:
                suffix = zone["Name"].rstrip(".")
                if not zone["Config"].get("PrivateZone") and (name == suffix or name.endswith(f".{suffix}")):
                    found.append((len(suffix), zone["Id"]))
        if not found:
            raise AcmeError(f"Route 53 has no public zone for {name}: name one in acme.zone")
        return max(found)[1]


def _reason(error: Exception) -> str:
    """What AWS says, without what was asked."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "?")) if isinstance(response, dict) else type(error).__name__
