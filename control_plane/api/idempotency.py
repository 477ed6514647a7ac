"""`Idempotency-Key`: a create that is sent twice happens once and is answered alike.

The answer is remembered in the transaction of the create itself. Secrets are not remembered.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.errors import Conflict
from control_plane.store import audit


def fingerprint(operation: str, body: Any) -> str:
    """What a repeat must agree on with the first."""
    text = json.dumps([operation, body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Once:
    """The key of one call; without a `key` nothing is remembered."""

    actor: str
    key: str | None
    print: str
    now: float

    async def repeated(self, session: AsyncSession) -> dict[str, Any] | None:
        """The remembered answer, if this is a repeat. Raises Conflict where the key was used for something else."""
        if self.key is None:
            return None
        row = await audit.remembered_answer(session, self.actor, self.key, self.now)
        if row is None:
            return None
        if row.fingerprint != self.print:
            raise Conflict("this Idempotency-Key was used for another request", code="idempotency_key_reused")
        return row.response

    def remember(self, session: AsyncSession, status: int, body: dict[str, Any]) -> None:
        if self.key is not None:
            audit.remember_answer(
                session,
                actor=self.actor,
                key=self.key,
                fingerprint=self.print,
                status=status,
                response=body,
                now=self.now,
            )
