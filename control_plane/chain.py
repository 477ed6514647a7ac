"""The chain of audit records: each has the hash of the one before it, and the installation's signature.

A changed record no longer has its hash, a missing or moved one breaks the chain. What was cut off at the end shows
against the count of all that were written, or a head that was kept elsewhere. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BEFORE_ALL = "0" * 64
MOST_FAULTS = 100


@dataclass(frozen=True, slots=True)
class Record:
    """One record as stored. `content` is everything that the hash covers besides `seq` and `previous`."""

    seq: int
    content: Mapping[str, Any]
    previous: str
    hash: str
    signature: str


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` is changed, missing, reordered, unsigned or cut."""

    seq: int
    kind: str
    message: str


def record_hash(seq: int, content: Mapping[str, Any], previous: str) -> str:
    text = json.dumps([seq, previous, content], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Verifier:
    """Takes records in the order in which they stand and collects what is wrong with the chain, up to a bound.

    `kept` is a head from earlier, which must still be in the chain.
    """

    def __init__(self, signed: Callable[[Record], bool], kept: str = BEFORE_ALL) -> None:
        self._signed = signed
        self._kept: str | None = None if kept == BEFORE_ALL else kept
        self.faults: list[Fault] = []
        self.count = 0
        self.seq = 0
        self.head = BEFORE_ALL

    def take(self, records: Iterable[Record]) -> None:
        for record in records:
            self.count += 1
            if record.seq < self.seq + 1:
                self._fault(record.seq, "reordered", f"it stands after number {self.seq}")
            elif record.seq > self.seq + 1:
                self._fault(self.seq + 1, "missing", f"numbers {self.seq + 1} to {record.seq - 1} aren't there")
            elif record.previous != self.head:
                self._fault(record.seq, "reordered", "it doesn't follow the record before it")
            if record_hash(record.seq, record.content, record.previous) != record.hash:
                self._fault(record.seq, "changed", "it isn't what was written")
            elif not self._signed(record):
                self._fault(record.seq, "unsigned", "its signature isn't this installation's")
            if record.hash == self._kept:
                self._kept = None
            self.seq, self.head = max(self.seq, record.seq), record.hash

    def end(self, expected: int) -> None:
        """`expected` records were ever written."""
        if self.seq < expected:
            self._fault(self.seq + 1, "cut", f"the last of {expected} records aren't there")
        if self._kept is not None:
            self._fault(self.seq, "cut", "the head that was kept isn't in the chain")

    def _fault(self, seq: int, kind: str, message: str) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(Fault(seq, kind, message))
