"""Makes a backup, looks at one, and brings an installation back from one. These block: they are commands."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from control_plane.backup import archive, database
from control_plane.backup.place import require_place
from control_plane.backup.sealed import SealedReader, SealedWriter
from control_plane.config import Settings, load_settings
from control_plane.domain import Role
from control_plane.errors import ConfigError, InvalidInput, KeyringMissing
from control_plane.observe.logs import iso
from control_plane.security.audit import AuditSigner
from control_plane.security.files import private_folder, write_private
from control_plane.security.keyring import Keyring
from control_plane.security.secret import load_secret
from control_plane.store import backups
from control_plane.store.audit import add_audit
from control_plane.store.database import Store
from control_plane.store.schema import require_schema, upgrade_schema

_ACTOR = "command line"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Backup:
    """`jurisdiction` is the place's, `regions` have those of the settings' regions; `digest` is the file's SHA-256."""

    created_at: str
    version: str
    jurisdiction: str | None
    regions: dict[str, str | None]
    accepts: list[str]
    files: int
    bytes: int
    digest: str


def create(
    settings: Settings, keyring: Keyring, file: Path, version: str, clock: Callable[[], float] = time.time
) -> Backup:
    """Write a backup of the installation to `file`, beside whatever runs. Raises ResidencyMismatch, ConfigError.

    It is on record before it has its name, and later than all that is in it.
    """
    if not (settings.home / "secret").exists():
        raise ConfigError(f"there is no installation at {settings.home}: choose its --home", param="home")
    require_schema(settings.store_url)
    signer = AuditSigner(load_secret(settings.home, keyring))
    place, accepts = settings.backup.jurisdiction, list(settings.backup.accepts)
    laws = {region.name: region.jurisdiction for region in settings.regions}
    require_place(place, laws, _with_store(settings.store_url, _regions), accepts)
    header: dict[str, Any] = {
        "created_at": iso(clock()),
        "version": version,
        "jurisdiction": place,
        "regions": laws,
        "accepts": accepts,
    }
    with tempfile.TemporaryDirectory(dir=settings.home, prefix=".backup-") as folder, _new(file) as (partial, to):
        copy = database.dump(settings.store_url, Path(folder))
        files = [*archive.files_of(settings.home), (f"{archive.DATABASE}/{copy.name}", copy)]
        writer = SealedWriter(to, header, keyring)
        archive.pack(files, writer)
        to.flush()
        os.fsync(to.fileno())
        jurisdictions = sorted({law for law in laws.values() if law})
        detail = {
            "digest": writer.digest,
            "jurisdiction": place,
            "jurisdictions": jurisdictions,
            "accepts": accepts,
        }
        _with_store(settings.store_url, lambda store: _record(store, signer, backups.CREATED, detail, clock()))
        size = partial.stat().st_size
    return Backup(**header, files=len(files), bytes=size, digest=writer.digest)


def verify(file: Path, keyring: Keyring) -> Backup:
    """Look at every byte of it. Raises DamagedBackup; ConfigError or Unavailable where the keyring can't open it."""
    with _opened(file) as from_:
        reader = SealedReader(from_, keyring)
        names = archive.unpack(reader, archive.nowhere)
    return _described(reader, len(names), file)


def restore(
    file: Path, home: Path, keyring_file: Path | None, keyring_of: Callable[[Settings], Keyring], now: float
) -> Backup:
    """Bring the installation back at `home`, which is empty or isn't there. All of it comes back, or nothing.

    What opens the backup is `keyring_file`, or what the environment says: never what the backup itself does.
    """
    given = {} if keyring_file is None else {"keyring": {"file": keyring_file}}
    keyring = keyring_of(load_settings({"home": home, **given}))
    with _opened(file) as from_, _workshop(home) as folder:
        try:
            reader = SealedReader(from_, keyring)
        except KeyringMissing:
            raise InvalidInput(
                "--keyring must name the keys that seal it: no backup has them", param="keyring"
            ) from None
        names = archive.unpack(reader, archive.into_folder(folder))
        found = _described(reader, len(names), file)
        made = folder / archive.HOME
        _set_up(folder, keyring, keyring_file, found.digest, now)
        # without its secret a home is none
        for path in sorted(made.iterdir(), key=lambda path: path.name == "secret"):
            path.rename(home / path.name)
    return found


def _set_up(folder: Path, keyring: Keyring, keyring_file: Path | None, digest: str, now: float) -> None:
    made = folder / archive.HOME
    (copy,) = (folder / archive.DATABASE).iterdir()
    settings = load_settings({"home": made})
    if keyring_file is not None and settings.keyring.file is None and settings.keyring.kms_key is None:
        write_private(made / "keyring", keyring_file.read_bytes())
    signer = AuditSigner(load_secret(made, keyring))
    database.require_empty(settings.store_url, copy.name)
    database.load(copy, settings.store_url)
    upgrade_schema(settings.store_url)
    _with_store(settings.store_url, lambda store: _record(store, signer, backups.RESTORED, {"digest": digest}, now))


async def _regions(store: Store) -> list[str]:
    async with store.read() as session:
        return await backups.regions_of_records(session)


async def _record(store: Store, signer: AuditSigner, action: str, detail: dict[str, Any], now: float) -> None:
    async with store.write() as session:
        await add_audit(
            session,
            signer.seal,
            at=now,
            actor=_ACTOR,
            role=Role.OWNER,
            action=action,
            target="installation",
            request_id="",
            detail=detail,
        )


def _with_store(url: str, work: Callable[[Store], Coroutine[Any, Any, Value]]) -> Value:
    async def run() -> Value:
        store = Store(url)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


@contextmanager
def _new(file: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A private file that has its name once all is well. Raises InvalidInput."""
    if file.exists():
        raise InvalidInput(f"{file} is there already", code="file_exists", param="file")
    try:
        handle, name = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
        partial = Path(name)
        try:
            with os.fdopen(handle, "wb") as to:
                yield partial, to
            partial.rename(file)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidInput(f"{file} can't be written: {error.strerror}", param="file") from None


@contextmanager
def _workshop(home: Path) -> Iterator[Path]:
    """A folder in `home`, which has to be empty: it may be a volume of its own. Raises ConfigError."""
    stood = home.exists()
    try:
        private_folder(home)
        filled = any(home.iterdir())
        folder = None if filled else Path(tempfile.mkdtemp(dir=home, prefix=".restore-"))
    except OSError as error:
        raise ConfigError(f"{home} can't be used ({error.strerror}): choose a writable --home", param="home") from None
    if folder is None:
        raise ConfigError(f"{home} isn't empty: a backup comes back into an empty home alone", code="home_not_empty")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not stood:
            with suppress(OSError):  # it isn't empty: something came back
                home.rmdir()


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        from_ = file.open("rb")
    except OSError as error:
        raise InvalidInput(f"{file} can't be read: {error.strerror}", param="file") from None
    with from_:
        yield from_


def _described(reader: SealedReader, files: int, file: Path) -> Backup:
    said = reader.header
    return Backup(
        created_at=str(said.get("created_at")),
        version=str(said.get("version")),
        jurisdiction=said.get("jurisdiction"),
        regions=dict(said.get("regions") or {}),
        accepts=list(said.get("accepts") or ()),
        files=files,
        bytes=file.stat().st_size,
        digest=reader.digest,
    )
