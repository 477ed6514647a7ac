"""Weights from the bucket of the replica's own region: `weights/MODEL/…`, or a single file `weights/MODEL`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from control_plane.errors import ProviderError
from control_plane.providers.aws_calls import AwsCalls

_MOST_FILES = 1000
_PART_BYTES = 8 * 1024 * 1024
_PARTS_AT_ONCE = 8


async def local_model(calls: AwsCalls, bucket: str, model: str, folder: Path) -> str:
    """The path of the model's weights once they are in `folder`; `model` as it is where the bucket hasn't any.

    Raises AwsFault; ProviderError where a name among them leads elsewhere.
    """
    prefix = bucket_key(model)
    found = await calls.pages("s3", "list_objects_v2", "Contents", _MOST_FILES, Bucket=bucket, Prefix=prefix)
    sizes = {str(one["Key"]): int(one["Size"]) for one in found}
    own = {
        key: size for key, size in sizes.items() if key == prefix or (key.startswith(f"{prefix}/") and key[-1] != "/")
    }
    if not own:
        return model
    for key, size in own.items():
        if ".." in key.split("/"):
            raise ProviderError(f"{key} in the bucket leads out of its folder", code="model_unreadable")
        path = folder / key
        if not path.exists() or path.stat().st_size != size:
            await _download(calls, bucket, key, size, path)
    return str(folder / prefix)


def bucket_key(model: str) -> str:
    return f"weights/{model}"


async def _download(calls: AwsCalls, bucket: str, key: str, size: int, path: Path) -> None:
    """In parts, several at once, each repeated by itself when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    with partial.open("wb") as file:
        file.truncate(size)
    turns = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def part(start: int) -> None:
        async with turns:
            span = f"bytes={start}-{min(size, start + _PART_BYTES) - 1}"
            answer = await calls.call("s3", "get_object", Bucket=bucket, Key=key, Range=span)
            await asyncio.to_thread(_write_at, partial, start, answer["Body"])

    await asyncio.gather(*(part(start) for start in range(0, size, _PART_BYTES)))
    partial.rename(path)


def _write_at(path: Path, start: int, part: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(part)
