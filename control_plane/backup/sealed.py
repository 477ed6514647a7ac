"""A file that is sealed as it is written and told apart from any other as it is read, without ever being held whole.

`INGLE BACKUP 1`, a line of JSON, and chunks: 1 MiB each, the last as long as it is, by AES-256-GCM under a key of the
file's own, which the keyring has sealed into the header. A chunk's nonce is its number and whether it is the last, and
each is bound to the header: what is changed, moved, cut off or added doesn't open.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from control_plane.errors import DamagedBackup
from control_plane.security.keyring import Keyring

_MAGIC = b"INGLE BACKUP 1\n"
_NAME = "backup"
_KEY_BYTES = 32
_TAG_BYTES = 16
_CHUNK = 1 << 20
_MOST_HEADER = 1 << 16


class SealedWriter:
    """`header` is for everybody's eyes. After `close`, `digest` is the SHA-256 of all that was written to `file`."""

    def __init__(self, file: BinaryIO, header: Mapping[str, Any], keyring: Keyring) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._count = 0
        self._waiting = bytearray()
        key = os.urandom(_KEY_BYTES)
        self._cipher = AESGCM(key)
        line = json.dumps({**header, "key": keyring.seal(key, _NAME).decode()}, sort_keys=True).encode() + b"\n"
        self._bound = hashlib.sha256(line).digest()
        self._put(_MAGIC + line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: bytes) -> int:
        self._waiting += data
        while len(self._waiting) > _CHUNK:
            self._chunk(bytes(self._waiting[:_CHUNK]), last=False)
            del self._waiting[:_CHUNK]
        return len(data)

    def close(self) -> None:
        self._chunk(bytes(self._waiting), last=True)
        self._waiting.clear()

    def _chunk(self, data: bytes, *, last: bool) -> None:
        self._put(self._cipher.encrypt(_nonce(self._count, last), data, self._bound))
        self._count += 1

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)


class SealedReader:
    """Gives out what `file` holds once it is known to be as it was written.

    Raises DamagedBackup, here and from `read`; ConfigError or Unavailable where the keyring can't open it.
    """

    def __init__(self, file: BinaryIO, keyring: Keyring) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._count = 0
        self._ready = b""
        if self._take(len(_MAGIC)) != _MAGIC:
            raise DamagedBackup("it isn't a backup of ingle")
        line = file.readline(_MOST_HEADER)
        self._digest.update(line)
        self.header = _parsed(line)
        block = str(self.header.pop("key", "")).encode()
        key = keyring.open(block, _NAME)
        if key == block or len(key) != _KEY_BYTES:  # what isn't sealed comes back as it is
            raise DamagedBackup("its key isn't sealed by any keyring")
        self._cipher = AESGCM(key)
        self._bound = hashlib.sha256(line).digest()
        self._next: bytes | None = self._take(_CHUNK + _TAG_BYTES)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def read(self, size: int) -> bytes:
        while len(self._ready) < size and self._next is not None:
            self._ready += self._open(self._next)
        found, self._ready = self._ready[:size], self._ready[size:]
        return found

    def finish(self) -> None:
        """To the end: what nobody asked for is looked at, too."""
        while self.read(_CHUNK):
            pass

    def _open(self, chunk: bytes) -> bytes:
        following = self._take(_CHUNK + _TAG_BYTES)
        try:
            data = self._cipher.decrypt(_nonce(self._count, not following), chunk, self._bound)
        except InvalidTag:
            raise DamagedBackup(f"it was changed or cut, at or before part {self._count + 1}") from None
        self._count += 1
        self._next = following or None
        return data

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data


def _nonce(count: int, last: bool) -> bytes:
    """No two chunks have the same, and no two files the same key."""
    return count.to_bytes(11, "big") + bytes([last])


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
        if line.endswith(b"\n") and isinstance(header, dict):
            return header
    except (ValueError, RecursionError):
        pass
    raise DamagedBackup("its header can't be read")
