"""Secrets at rest are sealed: each by a data key of its own, which a key-encryption key wraps (envelope encryption).

A sealed secret is a PEM block of its own kind, so that it may stand in a file beside certificates, which stay readable.
Key-encryption keys are in a file of this machine (`LocalKeeper`) or in AWS KMS (`KmsKeeper`). Rotating makes a new one,
and wraps every data key again; the secrets themselves don't change.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from control_plane.errors import ConfigError, KeyringMissing, Unavailable
from control_plane.security.files import private_folder, write_private

_BEGIN, _END = b"-----BEGIN INGLE SEALED-----\n", b"-----END INGLE SEALED-----\n"
_BLOCK = re.compile(re.escape(_BEGIN) + rb"([A-Za-z0-9+/=\n]+)" + re.escape(_END))
_KEY_BYTES = 32
_NONCE_BYTES = 12
_KEPT = 2
"""Local key-encryption keys: the one in use, and the one before it, which another process may just have used."""
_MOST_KNOWN = 256


class Keeper(Protocol):
    """Wraps data keys. `kind` says who wrapped one; what is wrapped opens only under the same `name`."""

    kind: str

    def wrap(self, data_key: bytes, name: str) -> bytes: ...

    def unwrap(self, wrapped: bytes, name: str) -> bytes: ...

    def rotate(self) -> str:
        """Wrap by a new key-encryption key from now on, where that is this side's to do. Returns what it is called."""

    def retire(self) -> None:
        """Forget keys that nothing is wrapped by any more."""


class LocalKeeper:
    """Key-encryption keys in the file `path` (0600), made at first use. Other processes' rotations are seen at once."""

    kind = "local"

    def __init__(self, path: Path) -> None:
        self._path = path

    def wrap(self, data_key: bytes, name: str) -> bytes:
        key_id, key = next(reversed(self._keys().items()))
        nonce = os.urandom(_NONCE_BYTES)
        return key_id.encode() + b":" + nonce + AESGCM(key).encrypt(nonce, data_key, name.encode())

    def unwrap(self, wrapped: bytes, name: str) -> bytes:
        named, _, rest = wrapped.partition(b":")
        key_id = named.decode(errors="replace")
        if not self._path.exists():
            raise KeyringMissing(f"{self._path} isn't there: put back the copy that you kept", param="keyring")
        key = self._read().get(key_id)
        if key is None:
            raise ConfigError(f"{self._path} has no key {key_id!r}: put back the copy that has it", param="keyring")
        return AESGCM(key).decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], name.encode())

    def rotate(self) -> str:
        with self._locked():
            return self._add(self._read())

    def retire(self) -> None:
        with self._locked():
            self._write(dict(list(self._read().items())[-_KEPT:]))

    def _keys(self) -> dict[str, bytes]:
        """By id, the newest last."""
        keys = self._read()
        if keys:
            return keys
        with self._locked():
            keys = self._read()
            if not keys:
                self._add(keys)
        return keys

    def _add(self, keys: dict[str, bytes]) -> str:
        key_id = os.urandom(6).hex()
        keys[key_id] = os.urandom(_KEY_BYTES)
        self._write(keys)
        return key_id

    def _write(self, keys: Mapping[str, bytes]) -> None:
        write_private(self._path, json.dumps({name: key.hex() for name, key in keys.items()}).encode())

    def _read(self) -> dict[str, bytes]:
        try:
            return {name: bytes.fromhex(key) for name, key in json.loads(self._path.read_bytes()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError):
            raise ConfigError(f"{self._path} can't be read: put back the copy that you kept", param="keyring") from None

    def _locked(self) -> _Lock:
        return _Lock(private_folder(self._path.parent) / f".{self._path.name}.lock")


class KmsKeeper:
    """A key of AWS KMS, `key_id` (an id, an ARN or an alias). `client` is boto3's."""

    kind = "kms"

    def __init__(self, client: Any, key_id: str) -> None:
        self._client = client
        self._key_id = key_id

    def wrap(self, data_key: bytes, name: str) -> bytes:
        reply = self._call("encrypt", KeyId=self._key_id, Plaintext=data_key, EncryptionContext={"ingle": name})
        return bytes(reply["CiphertextBlob"])

    def unwrap(self, wrapped: bytes, name: str) -> bytes:
        return bytes(self._call("decrypt", CiphertextBlob=wrapped, EncryptionContext={"ingle": name})["Plaintext"])

    def rotate(self) -> str:
        """KMS rotates its keys itself, or the alias names another one by now: this tells which is in force."""
        return str(self._call("describe_key", KeyId=self._key_id)["KeyMetadata"]["KeyId"])

    def retire(self) -> None:
        pass

    def _call(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            reply: Mapping[str, Any] = getattr(self._client, operation)(**arguments)
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "?")
            raise Unavailable(f"AWS KMS refused to {operation} ({code})", code="key_service_refused") from None
        except BotoCoreError as error:
            reason = type(error).__name__
            raise Unavailable(f"AWS KMS can't be reached ({reason})", code="key_service_unavailable") from None
        return reply


class Keyring:
    """Seals by `keeper`; what others of `also` wrapped is still opened."""

    def __init__(self, keeper: Keeper, *also: Keeper) -> None:
        self._keeper = keeper
        self._keepers = {one.kind: one for one in (*also, keeper)}
        self._known: dict[tuple[bytes, str], bytes] = {}
        """Data keys, so that a certificate that is looked at every few seconds doesn't ask KMS each time."""

    def seal(self, secret: bytes, name: str) -> bytes:
        """`secret` as a PEM block, which opens only under the same `name`."""
        return self._block(os.urandom(_KEY_BYTES), secret, name)

    def open(self, text: bytes, name: str) -> bytes:
        """`text` with what is sealed in it opened. Raises ConfigError, Unavailable."""
        return _BLOCK.sub(lambda match: self._open(match[1], name), text)

    def seal_again(self, text: bytes, name: str) -> bytes:
        """`text` with its data keys wrapped by the key-encryption key in force."""
        self._known.clear()

        def again(match: re.Match[bytes]) -> bytes:
            return self._block(self._data_key(_parsed(match[1]), name), self._open(match[1], name), name)

        return _BLOCK.sub(again, text)

    def rotate(self) -> str:
        """Take a new key-encryption key; `seal_again` is then for every sealed file. Returns what it is called."""
        return self._keeper.rotate()

    def retire(self) -> None:
        """Forget keys before the one in force and the one before that; once everything is sealed again."""
        self._keeper.retire()

    def _block(self, data_key: bytes, secret: bytes, name: str) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        envelope = {
            "by": self._keeper.kind,
            "key": _text(self._keeper.wrap(data_key, name)),
            "sealed": _text(nonce + AESGCM(data_key).encrypt(nonce, secret, name.encode())),
        }
        lines = textwrap.wrap(_text(json.dumps(envelope).encode()), 64)
        return _BEGIN + "\n".join(lines).encode() + b"\n" + _END

    def _open(self, block: bytes, name: str) -> bytes:
        envelope = _parsed(block)
        try:
            sealed = base64.b64decode(envelope["sealed"])
            key = AESGCM(self._data_key(envelope, name))
            return key.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError):
            raise ConfigError(f"{name} was changed, or sealed by another installation", param="keyring") from None

    def _data_key(self, envelope: Mapping[str, str], name: str) -> bytes:
        keeper = self._keepers.get(envelope["by"])
        if keeper is None:
            raise ConfigError(
                f"{name} is sealed by {envelope['by']}: the settings name no such keyring", param="keyring"
            )
        wrapped = base64.b64decode(envelope["key"])
        known = self._known.get((wrapped, name))
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[wrapped, name] = keeper.unwrap(wrapped, name)
        return known


class InTheClear(Keyring):
    """Seals nothing, and opens nothing."""

    def __init__(self) -> None:
        self._keepers = {}
        self._known = {}

    def seal(self, secret: bytes, name: str) -> bytes:
        return secret


IN_THE_CLEAR = InTheClear()


def open_keyring(
    home: Path, *, kms_key: str | None = None, kms_client: Any = None, file: Path | None = None
) -> Keyring:
    """The keyring of the installation at `home`: `kms_key` of AWS KMS where one is named, a local file otherwise."""
    local = LocalKeeper(file or home / "keyring")
    return Keyring(KmsKeeper(kms_client, kms_key), local) if kms_key else Keyring(local)


def sealed_files(home: Path) -> list[tuple[Path, str, Path]]:
    """All that may hold something sealed: the file, the name that it is sealed under, and the lock of its writers."""
    certs = home / "certs"
    found = [(home / "secret", "secret", home / ".secret.lock"), (certs / "ca.key", "ca.key", certs / ".lock")]
    found += [(path, path.name, certs / ".lock") for path in sorted(certs.glob("*.pem")) if path.name != "ca.pem"]
    acme = certs / "acme"
    found += [(path, path.name, path.with_suffix(".lock")) for path in sorted(acme.glob("*.pem"))]
    found.append((acme / "account.key", "account.key", acme / ".account.lock"))
    return [item for item in found if item[0].exists()]


def rotate_keyring(home: Path, keyring: Keyring) -> tuple[str, int]:
    """A new key-encryption key, and everything sealed wrapped by it. Returns what it is called, and how many files.

    Safe to repeat: no key is forgotten before everything is sealed again.
    """
    key_id = keyring.rotate()
    files = sealed_files(home)
    for path, name, lock in files:
        with _Lock(lock):
            text = path.read_bytes()
            write_private(path, keyring.seal_again(text, name) if _BLOCK.search(text) else _sealed(text, name, keyring))
    keyring.retire()
    return key_id, len(files)


_PRIVATE = re.compile(rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----.*?-----END (?:[A-Z]+ )?PRIVATE KEY-----\n?", re.DOTALL)


def _sealed(text: bytes, name: str, keyring: Keyring) -> bytes:
    """What an older version left in the clear."""
    if name == "secret":
        return keyring.seal(text, name)
    return _PRIVATE.sub(lambda match: keyring.seal(match[0], name), text)


class _Lock:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._file = open(self._path, "a")  # closed on the way out
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _parsed(block: bytes) -> dict[str, str]:
    try:
        envelope: dict[str, str] = json.loads(base64.b64decode(block))
        if envelope.keys() >= {"by", "key", "sealed"}:
            return envelope
    except ValueError:
        pass
    raise ConfigError("a sealed secret is damaged: restore it from a backup", param="keyring")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
