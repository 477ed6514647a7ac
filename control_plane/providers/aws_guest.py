"""`python -m control_plane.providers.aws_guest ORDER`: runs one replica on its instance, as the local provider does.

ORDER is JSON, as `aws_launch` makes it. The replica's token and certificate come from Secrets Manager, its weights from
the region's bucket. When this returns, the machine powers off; until then each new word from a controller puts off
the power-off that was set at boot. A reboot isn't survived: nothing answers then, and the machine's time runs out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp

from control_plane.domain import NODE, Description, Phase, ReplicaSpec, Weights
from control_plane.errors import ProviderError
from control_plane.observe.logs import event
from control_plane.providers.aws_calls import AwsCalls
from control_plane.providers.aws_marks import ALIVE, CONTROLLER, ENDED, LOGS, REPORTS, STARTED, Marks
from control_plane.providers.aws_residence import Residence
from control_plane.providers.aws_weights import bucket_key, local_model
from control_plane.providers.base import stage_flags
from control_plane.providers.delivered import Delivered, OneToken
from control_plane.providers.local import LocalProvider
from control_plane.security.files import private_folder

_METADATA = "http://169.254.169.254"
_METADATA_SECONDS = aiohttp.ClientTimeout(total=5)
_METADATA_TOKEN_SECONDS = 21_600
_LOOK_SECONDS = 0.2
_CERTIFICATE_SECONDS = 60.0
_LOG_SECONDS = 15.0
_LAST_LINES = 200
_LINE_CHARACTERS = 1000
_SAY_AGAIN_SECONDS = 86_400.0
"""A report is written again after that, so that it doesn't expire while the replica runs."""


class Metadata:
    """The instance's own, by IMDSv2."""

    def __init__(self) -> None:
        self._root = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _METADATA).rstrip("/")

    async def get(self, path: str) -> str | None:
        """None where there is no such thing. Raises aiohttp.ClientError, TimeoutError."""
        async with aiohttp.ClientSession(timeout=_METADATA_SECONDS) as session:
            asked = {"X-aws-ec2-metadata-token-ttl-seconds": str(_METADATA_TOKEN_SECONDS)}
            async with session.put(f"{self._root}/latest/api/token", headers=asked) as answer:
                answer.raise_for_status()
                token = {"X-aws-ec2-metadata-token": await answer.text()}
            async with session.get(f"{self._root}/latest/meta-data/{path}", headers=token) as answer:
                if answer.status == 404:
                    return None
                answer.raise_for_status()
                return await answer.text()


class Guest:
    """One replica's life on its instance. Times in `order` are in seconds unless their names say otherwise."""

    def __init__(self, order: Mapping[str, Any], calls: AwsCalls, metadata: Metadata) -> None:
        self._order = order
        spec = ReplicaSpec(**order["spec"] | {"engine_args": tuple(order["spec"]["engine_args"])})
        self._spec = spec
        self._id = spec.replica_id
        self._calls = calls
        self._marks = Marks(calls, order["bucket"], order["installation"])
        self._metadata = metadata
        self._instance = ""
        self._home = private_folder(Path(order["home"]))
        self._local: LocalProvider | None = None
        self._delivered: Delivered | None = None
        self._reported: tuple[Description, float] | None = None
        self._logged = (0, float("-inf"))
        self._word = ""
        self._weights: Weights | None = None
        self._notice = ""

    async def run(self) -> None:
        """Until it is to end, or may not begin."""
        self._instance = await self._metadata.get("instance-id") or ""
        host = await self._metadata.get("local-ipv4") or ""
        if not await self._may_start():
            event("guest.not_the_one", replica=self._id, instance=self._instance)
            return
        try:
            local = await self._supervisor(host)
            await local.ensure(await self._here())
            self._local = local
        except (ProviderError, OSError, ValueError) as error:
            code = error.code if isinstance(error, ProviderError) else "start_failed"
            await self._report(
                Description(Phase.FAILED, code=code, message=f"its instance can't run it: {error}"[:500])
            )
        await self._watch()
        await self._end()

    async def _may_start(self) -> bool:
        """Whether this instance is the one. The order matters: `terminate` marks the end, then looks for instances."""
        first = await self._marks.claim(STARTED, self._id, self._instance.encode())
        return first.decode() == self._instance and not await self._marks.has(ENDED, self._id)

    async def _supervisor(self, host: str) -> LocalProvider:
        given = await self._secret()
        folder = private_folder(self._home / "replicas" / self._id)
        if given["pair"]:
            self._delivered = Delivered(folder, given["pair"], given["authority"])
        return LocalProvider(
            self._home,
            OneToken(given["token"]),
            regions=[self._spec.region],
            command=self._order["command"],
            terminate_grace=self._order["grace"],
            log_bytes=self._order["log_bytes"],
            mesh=self._delivered,
            variables={self._spec.region: self._order["variables"]},
            host=host,
        )

    async def _here(self) -> ReplicaSpec:
        """The spec in this machine's words: weights are a path, the accelerator is a device, the port is fixed."""
        bucket = self._order["bucket"]
        # a client of S3 follows a bucket to wherever it is
        region = await Residence(self._calls, bucket).require()
        model = await local_model(self._calls, bucket, self._spec.model, self._home / "weights")
        own_files = model == self._spec.model
        self._weights = Weights(NODE) if own_files else Weights(f"s3://{bucket}/{bucket_key(self._spec.model)}", region)
        device = "cpu" if self._spec.gpu in (None, "cpu") else "cuda"
        own = ("--port", str(self._order["port"]), "--device", device, *stage_flags(self._spec))
        return replace(self._spec, model=model, gpu=None, gpus=0, engine_args=(*own, *self._spec.engine_args))

    async def _secret(self) -> dict[str, str]:
        found = await self._calls.call("secretsmanager", "get_secret_value", SecretId=self._order["secret"])
        return dict(json.loads(found["SecretString"]))

    async def _watch(self) -> None:
        """Says how the replica is and hears what is to become of it, until that is its end."""
        word_at = certificate_at = time.monotonic()
        while True:
            now = time.monotonic()
            try:
                if self._local is not None:
                    await self._report(replace(await self._local.describe(self._id), weights=self._weights))
                if now >= self._logged[1] + _LOG_SECONDS:
                    await self._keep_logs(now)
                if now >= word_at:
                    word_at = now + float(self._order["word_seconds"])
                    if await self._marks.has(ENDED, self._id):
                        return
                    await self._hear()
                    await self._heed_notice()
                if self._delivered is not None and now >= certificate_at + _CERTIFICATE_SECONDS:
                    certificate_at = now
                    given = await self._secret()
                    self._delivered.take(given["pair"], given["authority"])
            except (ProviderError, aiohttp.ClientError, TimeoutError) as error:
                event("guest.trouble", level=logging.WARNING, replica=self._id, reason=str(error))
            await asyncio.sleep(_LOOK_SECONDS)

    async def _hear(self) -> None:
        """A controller lives: the power-off that is set is put off."""
        mark = await self._marks.get(ALIVE, CONTROLLER)
        if mark is not None and mark.body.decode() != self._word:
            self._word = mark.body.decode()
            timer = await asyncio.create_subprocess_exec("shutdown", "-P", f"+{self._order['deadman_minutes']}")
            await timer.wait()

    async def _heed_notice(self) -> None:
        """AWS takes a spot instance back in two minutes; a controller that knows can drain and replace it."""
        notice = await self._metadata.get("spot/instance-action")
        if notice is not None and not self._notice:
            self._notice = f"AWS takes its spot instance back: {notice[:200]}"
            event("guest.interrupted", level=logging.WARNING, replica=self._id, notice=notice[:200])

    async def _report(self, found: Description) -> None:
        if self._notice and found.phase is Phase.RUNNING:
            found = replace(found, code="spot_interrupted", message=self._notice)
        now = time.monotonic()
        if self._reported is not None and self._reported[0] == found and now - self._reported[1] < _SAY_AGAIN_SECONDS:
            return
        await self._keep_logs(now)
        said = {**asdict(found), "instance": self._instance}
        await self._marks.put(REPORTS, self._id, json.dumps(said).encode())
        self._reported = (found, now)

    async def _keep_logs(self, now: float) -> None:
        """What was logged last, for those who can't come here and for when there is no here any more."""
        if self._local is None:
            return
        lines, position = await asyncio.to_thread(self._local.logs, self._id, _LAST_LINES)
        if position != self._logged[0]:
            kept = {"lines": [line[:_LINE_CHARACTERS] for line in lines], "position": position}
            await self._marks.put(LOGS, self._id, json.dumps(kept).encode())
        self._logged = (position, now)

    async def _end(self) -> None:
        if self._local is None:
            return
        while (await self._local.describe(self._id)).phase is not Phase.ABSENT:
            await self._local.terminate(self._id)
            await asyncio.sleep(_LOOK_SECONDS)
        await self._keep_logs(time.monotonic())


@contextlib.asynccontextmanager
async def _calls(region: str) -> AsyncIterator[AwsCalls]:
    calls = AwsCalls(region)
    try:
        yield calls
    finally:
        calls.close()


async def _main(order: Mapping[str, Any]) -> int:
    async with _calls(order["region"]) as calls:
        try:
            await Guest(order, calls, Metadata()).run()
        except (ProviderError, aiohttp.ClientError, TimeoutError, OSError) as error:
            event("guest.failed", level=logging.ERROR, reason=str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(json.loads(sys.argv[1]))))
