"""Evidence of where an endpoint ran: JSON lines, each chained to the one before and signed. Pure.

Whoever has the file and the installation's public key can check it, anywhere, with nothing else: a changed line no
longer has its hash, one that is missing or moved breaks the chain, and what was cut off shows since the last line
counts all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from control_plane.chain import BEFORE_ALL, Fault, Record, Verifier, record_hash
from control_plane.errors import InvalidInput

MOST_BYTES = 256 << 20
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


def write(records: Iterable[Mapping[str, Any]], seal: Seal) -> list[str]:
    """Lines; a last one is added that counts them all. Each record has a `kind`."""
    lines: list[str] = []
    previous = BEFORE_ALL
    chained = list(records)
    for seq, content in enumerate([*chained, {"kind": _END, "records": len(chained) + 1}], 1):
        digest, signature = seal(seq, content, previous)
        record = {"seq": seq, "content": content, "previous": previous, "hash": digest, "signature": signature}
        lines.append(json.dumps(record, sort_keys=True, separators=(",", ":")))
        previous = digest
    return lines


def verify(text: str, public_key: str) -> Verdict:
    """Check a file against the public key (PEM) of the installation that wrote it. Raises InvalidInput for no key."""
    signed = _signatures(public_key)
    records: list[Record] = []
    faults: list[Fault] = []
    lines = text.split("\n")
    if lines and lines[-1] == "":
        lines.pop()
    for number, line in enumerate(lines, 1):
        record = _read(line)
        if record is None:
            faults.append(Fault(number, "changed", "the line isn't a record as it was written"))
            continue
        records.append(record)
    verifier = Verifier(signed)
    verifier.take(records)
    last = records[-1].content if records else {}
    counted = last.get("records") if last.get("kind") == _END else None
    if not isinstance(counted, int):
        verifier.faults.append(Fault(verifier.seq + 1, "cut", "the last line, which counts all, isn't there"))
    elif counted != len(records):
        verifier.faults.append(Fault(verifier.seq, "cut", f"{counted} records were written, {len(records)} are here"))
    about = records[0].content if records else {}
    return Verdict(len(records), verifier.head, [*faults, *verifier.faults], about)


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
