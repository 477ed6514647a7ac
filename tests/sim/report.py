"""What a run came to, or why it broke."""

from __future__ import annotations

from dataclasses import dataclass


class Broken(AssertionError):
    """An invariant doesn't hold."""


@dataclass
class Report:
    """What a run came to. `trace` is a hash of all that happened: equal for equal seeds."""

    seed: int
    requests: int = 0
    answered: int = 0
    refused: int = 0
    machines: int = 0
    kills: int = 0
    orphans: int = 0
    trace: str = ""
