"""What is in a backup: named files, one after the other. What a home needs to come back, and no keys to open it by."""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO, cast

from control_plane.backup import database
from control_plane.backup.sealed import SealedReader, SealedWriter
from control_plane.errors import DamagedBackup

HOME, DATABASE = "home", "database"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}"
_ALLOWED = re.compile(
    rf"{HOME}/(ingle\.toml|secret|certs/{_NAME}|certs/acme/{_NAME})"
    rf"|{DATABASE}/({re.escape(database.SQLITE)}|{re.escape(database.POSTGRES)})"
)
_AS_BIG = 1 << 40
_BUFFER = 1 << 20
Take = Callable[[str, IO[bytes]], None]


def files_of(home: Path) -> list[tuple[str, Path]]:
    """Settings, sealed secrets, certificates. The keyring stays: a backup opens nothing by itself."""
    certs = home / "certs"
    found = [home / "ingle.toml", home / "secret", certs / "ca.key", *sorted(certs.glob("*.pem"))]
    acme = certs / "acme"
    found += [acme / "account.key", *sorted(acme.glob("*.pem"))]
    return [(f"{HOME}/{path.relative_to(home)}", path) for path in found if path.is_file()]


def pack(files: Sequence[tuple[str, Path]], into: SealedWriter) -> None:
    """Raises OSError where one can't be read."""
    with tarfile.open(fileobj=cast(BinaryIO, into), mode="w|", bufsize=_BUFFER) as archive:
        for name, path in files:
            entry = tarfile.TarInfo(name)
            with path.open("rb") as file:
                entry.size, entry.mode = file.seek(0, 2), 0o600
                file.seek(0)
                archive.addfile(entry, file)
    into.close()


def unpack(reader: SealedReader, take: Take) -> list[str]:
    """Give each file to `take`, and look at all of the backup. Returns their names. Raises DamagedBackup."""
    names = []
    try:
        for name, file in _entries(reader):
            take(name, file)
            names.append(name)
    except tarfile.TarError:
        raise DamagedBackup("what is in it can't be read") from None
    reader.finish()
    if f"{HOME}/secret" not in names or not any(name.startswith(f"{DATABASE}/") for name in names):
        raise DamagedBackup("it has no installation in it")
    return names


def into_folder(folder: Path) -> Take:
    """Writes each file to its own name under `folder`."""

    def take(name: str, file: IO[bytes]) -> None:
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("xb") as to:
            shutil.copyfileobj(file, to)

    return take


def nowhere(name: str, file: IO[bytes]) -> None:
    """Only looks at it."""


def _entries(reader: SealedReader) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(fileobj=cast(BinaryIO, reader), mode="r|", bufsize=_BUFFER) as archive:
        for entry in archive:
            file = archive.extractfile(entry) if entry.isreg() else None
            if file is None or not _ALLOWED.fullmatch(entry.name) or entry.size > _AS_BIG:
                raise DamagedBackup("it has something in it that no backup has")
            yield entry.name, file
