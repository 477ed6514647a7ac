"""Calls to AWS: in threads of their own, each with a time-out, repeated within bounds. All we call may be repeated."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from control_plane.errors import ProviderError
from control_plane.providers.aws_errors import AwsFault, Kind, kind_of
from control_plane.security.aws import aws_client

_AT_ONCE = 8
_ATTEMPTS = 4
_TOTAL_SECONDS = 15.0
"""No further attempt begins after that."""
PAUSE_SECONDS = 0.25
_MOST_PAUSE = 4.0
_AGAIN = frozenset({Kind.THROTTLED, Kind.PASSING})
BUCKET_REGION = "x-amz-bucket-region"
"""The header by which S3 says where a bucket is."""


class AwsCalls:
    """One region's. `pause` is what the first repetition waits, in seconds; then it doubles, half of it by chance."""

    def __init__(
        self,
        region: str,
        endpoint_url: str | None = None,
        *,
        pause: float = PAUSE_SECONDS,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.region = region
        self._endpoint_url = endpoint_url
        self._pause = pause
        self._chance = chance
        self._clients: dict[str, Any] = {}
        self._making = threading.Lock()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix=f"aws-{region}")

    async def call(self, service: str, operation: str, **arguments: Any) -> Mapping[str, Any]:
        """The answer to a boto3 client's method, a `Body` as bytes. Raises AwsFault."""
        give_up_at = time.monotonic() + _TOTAL_SECONDS
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._once, service, operation, arguments
                )
            except AwsFault as fault:
                fault.repeated = attempt > 1
                last = attempt == _ATTEMPTS or time.monotonic() > give_up_at
                if fault.kind not in _AGAIN or last:
                    raise
                pause = min(_MOST_PAUSE, self._pause * 2.0 ** (attempt - 1))
                await asyncio.sleep(pause * (0.5 + self._chance() / 2))
        raise AssertionError("the last attempt returns or raises")

    async def pages(self, service: str, operation: str, items: str, most: int, **arguments: Any) -> list[Any]:
        """`items` of all pages, up to `most`. Raises AwsFault, ProviderError where there are more."""
        found: list[Any] = []
        while True:
            answer = await self.call(service, operation, **arguments)
            found += answer.get(items, [])
            after = answer.get("NextToken") or answer.get("NextContinuationToken")
            if not after:
                return found
            if len(found) > most:
                raise ProviderError(f"AWS {operation} has more than {most} answers", code="too_many_replicas")
            arguments["NextToken" if "NextToken" in answer else "ContinuationToken"] = after

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _once(self, service: str, operation: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            answer: dict[str, Any] = getattr(self._client(service), operation)(**arguments)
            if "Body" in answer:
                answer["Body"] = answer["Body"].read()
        except ClientError as error:
            said = error.response.get("Error", {})
            about = error.response.get("ResponseMetadata", {})
            status = int(about.get("HTTPStatusCode", 0))
            code = str(said.get("Code", status))
            place = str(about.get("HTTPHeaders", {}).get(BUCKET_REGION, ""))
            message = str(said.get("Message", ""))
            raise AwsFault(operation, kind_of(code, status), code, message, bucket_region=place) from None
        except NoCredentialsError as error:
            raise AwsFault(operation, Kind.DENIED, "NoCredentials", str(error)) from None
        except BotoCoreError as error:
            raise AwsFault(operation, Kind.PASSING, type(error).__name__, "the call wasn't answered") from None
        return answer

    def _client(self, service: str) -> Any:
        """Made at first use: loading what a service is takes a while. Threads may share one, but not make it."""
        with self._making:
            if service not in self._clients:
                self._clients[service] = aws_client(service, self.region, self._endpoint_url, attempts=1)
            return self._clients[service]
