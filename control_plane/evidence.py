"""Evidence of where an endpoint ran: JSON lines, each chained to the one before and signed. Pure.

Whoever has the file and the installation's public key can check it, anywhere, with nothing else: a changed line no
longer has its hash, one that is missing or moved breaks the chain, and what was cut off shows since the last line
counts all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from control_plane.chain import BEFORE_ALL, MOST_FAULTS, Fault, Record, Verifier, record_hash
from control_plane.errors import InvalidInput

_MOST_CHARACTERS = 1 << 20
_END = "end"
_FIELDS = frozenset({"seq", "content", "previous", "hash", "signature"})
Seal = Callable[[int, Mapping[str, Any], str], tuple[str, str]]
"""Number, content and the hash before → a record's hash and signature."""


@dataclass(frozen=True)
class Verdict:
    """What became of a check. `about` is the first record's content, where it could be read."""

    records: int
    head: str
    faults: Sequence[Fault]
    about: Mapping[str, Any]


class Writer:
    """Makes lines of records, one after the other. Each record has a `kind`."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._previous = BEFORE_ALL
        self._count = 0

    def line(self, content: Mapping[str, Any]) -> str:
        self._count += 1
        digest, signature = self._seal(self._count, content, self._previous)
        record = {"seq": self._count, "content": content, "previous": self._previous, "hash": digest,
                  "signature": signature}  # fmt: skip
        self._previous = digest
        return json.dumps(record, sort_keys=True, separators=(",", ":"))

    def end(self) -> str:
        """The last line, which counts them all."""
        return self.line({"kind": _END, "records": self._count + 1})


def lines_of(file: TextIO) -> Iterator[str]:
    """Of a file that is read with `newline="\n"`; what is longer than any line of evidence is cut."""
    while line := file.readline(_MOST_CHARACTERS):
        yield line.removesuffix("\n")


def verify(lines: Iterable[str], public_key: str) -> Verdict:
    """Check lines against the public key (PEM) of the installation that wrote them. Raises InvalidInput for no key."""
    verifier = Verifier(_signatures(public_key))
    unread: list[Fault] = []
    about: Mapping[str, Any] | None = None
    last: Mapping[str, Any] = {}
    for number, line in enumerate(lines, 1):
        record = _read(line)
        if record is None:
            if len(unread) < MOST_FAULTS:
                unread.append(Fault(number, "changed", "the line isn't a record as it was written"))
            continue
        verifier.take([record])
        about, last = record.content if about is None else about, record.content
    counted = last.get("records") if last.get("kind") == _END else None
    if not isinstance(counted, int):
        verifier.faults.append(Fault(verifier.seq + 1, "cut", "the last line, which counts all, isn't there"))
    elif counted != verifier.count:
        message = f"{counted} records were written, {verifier.count} are here"
        verifier.faults.append(Fault(verifier.seq, "cut", message))
    return Verdict(verifier.count, verifier.head, [*unread, *verifier.faults], about or {})


def _read(line: str) -> Record | None:
    """A line as `write` makes it, byte by byte: what says the same in another spelling is not what was written."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or entry.keys() != _FIELDS or not isinstance(entry["content"], dict):
        return None
    if not isinstance(entry["seq"], int) or json.dumps(entry, sort_keys=True, separators=(",", ":")) != line:
        return None
    if not all(isinstance(entry[name], str) for name in ("previous", "hash", "signature")):
        return None
    if record_hash(entry["seq"], entry["content"], entry["previous"]) != entry["hash"]:
        return None
    return Record(entry["seq"], entry["content"], entry["previous"], entry["hash"], entry["signature"])


def _signatures(public_key: str) -> Callable[[Record], bool]:
    try:
        key = load_pem_public_key(public_key.encode())
    except ValueError:
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInput("the public key isn't an Ed25519 key in PEM", param="public_key")

    def signed(record: Record) -> bool:
        try:
            key.verify(bytes.fromhex(record.signature), bytes.fromhex(record.hash))
        except (InvalidSignature, ValueError):
            return False
        return record.signature == record.signature.lower()

    return signed
