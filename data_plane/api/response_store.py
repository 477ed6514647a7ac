"""Conversations kept for `previous_response_id`: in memory only, for half an hour, within bounds, by tenant.

Nothing of it reaches a disk or a log. When the replica ends, so does what it kept; a client then gets a 404 and sends
the conversation itself.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from data_plane.errors import RequestError

RETENTION_S = 1800.0
MOST_RESPONSES = 1000
MOST_CHARACTERS = 16 << 20


@dataclass(frozen=True)
class Stored:
    """owner: the tenant's salt; messages: the whole conversation, the reply included."""

    id: str
    owner: str
    messages: list[dict[str, Any]]

    @property
    def size(self) -> int:
        return sum(len(json.dumps(message)) for message in self.messages)


class ResponseStore:
    """Oldest first out. `now`: CLOCK_MONOTONIC seconds."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[float, Stored]] = OrderedDict()
        self._characters = 0

    def put(self, stored: Stored, now: float) -> None:
        self._kept[stored.id] = (now + RETENTION_S, stored)
        self._characters += stored.size
        while len(self._kept) > MOST_RESPONSES or self._characters > MOST_CHARACTERS or self._first_expiry() <= now:
            self._drop(next(iter(self._kept)))

    def messages(self, id: str, owner: str, now: float) -> list[dict[str, Any]]:
        """Raises RequestError (404) where it is unknown, expired or another tenant's."""
        expires, stored = self._kept.get(id, (0.0, None))
        if stored is None or stored.owner != owner or expires <= now:
            raise RequestError(
                f"the response {id!r} is not kept here (they are for {RETENTION_S / 60:.0f} minutes, unless the "
                "replica ends first): send the conversation in input",
                param="previous_response_id", code="previous_response_not_found", status=404,
            )  # fmt: skip
        return [dict(message) for message in stored.messages]

    def __len__(self) -> int:
        return len(self._kept)

    def _first_expiry(self) -> float:
        return next(iter(self._kept.values()))[0] if self._kept else float("inf")

    def _drop(self, id: str) -> None:
        _, stored = self._kept.pop(id)
        self._characters -= stored.size
