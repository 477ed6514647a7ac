"""Where a region's bucket and secrets are by AWS's own word. With one elsewhere no replica starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from control_plane.errors import ProviderRefused
from control_plane.providers.aws_calls import BUCKET_REGION, AwsCalls
from control_plane.providers.aws_errors import AwsFault
from control_plane.section import arn_region

_FRESH_SECONDS = 60.0


class Residence:
    """Of the bucket that `calls` are to find in their own region. What S3 said is believed for a minute."""

    def __init__(self, calls: AwsCalls, bucket: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = calls
        self._bucket = bucket
        self._clock = clock
        self._said = ""
        self._said_at = float("-inf")

    async def bucket(self) -> str:
        """The region of AWS that the bucket is in. Raises AwsFault; ProviderRefused where S3 doesn't say."""
        if self._clock() - self._said_at > _FRESH_SECONDS:
            self._said, self._said_at = await self._ask(), self._clock()
        return self._said

    async def require(self) -> str:
        """The same. Raises ProviderRefused where that is another region."""
        found = await self.bucket()
        if found != self._calls.region:
            raise _elsewhere(f"bucket {self._bucket}", found, self._calls.region)
        return found

    def require_secret(self, answer: Mapping[str, Any]) -> None:
        """Raises ProviderRefused where Secrets Manager's answer names a secret of another region."""
        found = arn_region(str(answer["ARN"]))
        if found != self._calls.region:
            raise _elsewhere(f"secret {answer['Name']}", found, self._calls.region)

    async def _ask(self) -> str:
        try:
            answer = await self._calls.call("s3", "head_bucket", Bucket=self._bucket)
        except AwsFault as fault:
            # S3 says it even to those who may not look, and where a bucket is sought in a wrong place
            if not fault.bucket_region:
                raise
            return fault.bucket_region
        found = str(answer["ResponseMetadata"]["HTTPHeaders"].get(BUCKET_REGION, ""))
        if not found:
            raise ProviderRefused(f"S3 doesn't say where bucket {self._bucket} is", code="residency_unknown")
        return found


def _elsewhere(what: str, found: str, wanted: str) -> ProviderRefused:
    message = f"{what} is in {found}, not in {wanted}"
    return ProviderRefused(message, code="residency_mismatch", permanent=True)
