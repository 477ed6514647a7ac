"""Marks in a region's bucket: what must be known of a replica when no database and no memory is there.

S3 is read as it was last written, and can be written only if nobody else did. Keys are KIND/INSTALLATION/REPLICA:
`live` from before anything is asked of EC2 until it is gone (holds the very request), `started` once an instance may
run it (holds which), `ended` for good, `reports` what its instance says of it, `logs` what it logged last;
`alive/INSTALLATION/controller` changes while a controller lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from control_plane.providers.aws_calls import AwsCalls
from control_plane.providers.aws_errors import AwsFault, Kind

LIVE, STARTED, ENDED, REPORTS, LOGS, ALIVE = "live", "started", "ended", "reports", "logs", "alive"
CONTROLLER = "controller"
_MOST = 20_000


@dataclass(frozen=True, slots=True)
class Mark:
    """`age` is in seconds, by S3's own clock; `version` changes with the body."""

    body: bytes
    version: str
    age: float


class Marks:
    def __init__(self, calls: AwsCalls, bucket: str, installation: str) -> None:
        self._calls = calls
        self._bucket = bucket
        self._installation = installation

    async def get(self, kind: str, name: str) -> Mark | None:
        """Raises AwsFault."""
        try:
            answer = await self._calls.call("s3", "get_object", Bucket=self._bucket, Key=self._key(kind, name))
        except AwsFault as fault:
            if fault.kind is Kind.MISSING:
                return None
            raise
        return Mark(bytes(answer["Body"]), str(answer["ETag"]), _age(answer))

    async def has(self, kind: str, name: str) -> bool:
        return await self.age(kind, name) is not None

    async def age(self, kind: str, name: str) -> float | None:
        """Seconds since it was written; None where it isn't."""
        try:
            return _age(await self._calls.call("s3", "head_object", Bucket=self._bucket, Key=self._key(kind, name)))
        except AwsFault as fault:
            if fault.kind is Kind.MISSING:
                return None
            raise

    async def put(self, kind: str, name: str, body: bytes) -> None:
        await self._put(kind, name, body)

    async def claim(self, kind: str, name: str, body: bytes) -> bytes:
        """Write it if it isn't there yet. Returns what is there now: another one's, where that came first."""
        return await self._first(kind, name, body, IfNoneMatch="*")

    async def replace(self, kind: str, name: str, version: str, body: bytes) -> bytes:
        """Write it if it still is `version`. Returns what is there now; `body` again where it is gone meanwhile."""
        return await self._first(kind, name, body, IfMatch=version)

    async def delete(self, kind: str, name: str) -> None:
        await self._calls.call("s3", "delete_object", Bucket=self._bucket, Key=self._key(kind, name))

    async def listed(self, kind: str) -> dict[str, tuple[str, datetime]]:
        """Version and time of each, by name."""
        prefix = self._key(kind, "")
        found = await self._calls.pages(
            "s3", "list_objects_v2", "Contents", _MOST, Bucket=self._bucket, Prefix=prefix, MaxKeys=1000
        )
        return {str(one["Key"]).removeprefix(prefix): (str(one["ETag"]), one["LastModified"]) for one in found}

    def _key(self, kind: str, name: str) -> str:
        return f"{kind}/{self._installation}/{name}"

    async def _put(self, kind: str, name: str, body: bytes, **condition: str) -> None:
        await self._calls.call(
            "s3", "put_object", Bucket=self._bucket, Key=self._key(kind, name), Body=body, **condition
        )

    async def _first(self, kind: str, name: str, body: bytes, **condition: str) -> bytes:
        try:
            await self._put(kind, name, body, **condition)
        except AwsFault as fault:
            if fault.kind not in (Kind.TAKEN, Kind.MISSING):
                raise
            # our own, too, where the answer was lost and the call repeated
            found = await self.get(kind, name)
            return found.body if found is not None else body
        return body


def _age(answer: Any) -> float:
    now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    return max(0.0, float((now - answer["LastModified"]).total_seconds()))
