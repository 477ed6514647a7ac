"""The shape of an admin operation. One table of these makes both the routes and the OpenAPI document."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.api.idempotency import Once
from control_plane.domain import Role
from control_plane.errors import Unprocessable
from control_plane.store import audit

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks: the admin token's name and role."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation. `body` is an instance of the operation's `takes`, with `given` the fields it named."""

    actor: Actor
    request_id: str
    path: Mapping[str, str]
    query: Query
    body: Any
    given: frozenset[str]
    if_generation: int | None
    once: Once
    seal: audit.Seal
    now: float

    async def audit(self, session: AsyncSession, action: str, target: str, /, **detail: Any) -> None:
        """Record, in the change's own transaction, who did it."""
        await audit.add_audit(
            session,
            self.seal,
            at=self.now,
            actor=self.actor.name,
            role=self.actor.role,
            action=action,
            target=target,
            request_id=self.request_id,
            detail=detail,
        )


@dataclass(frozen=True, slots=True)
class Page:
    """A list's answer; `next` is the cursor of the following page."""

    items: list[BaseModel]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    body: BaseModel
    status: int = 200
    generation: int | None = None
    """Becomes the ETag."""


@dataclass(frozen=True, slots=True)
class Lines:
    """An answer of JSON lines, written as they are made: it may be longer than memory has room for."""

    text: AsyncGenerator[str, None]


Handler = Callable[[Call], Awaitable[Answer | Page | Lines]]


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    description: str
    kind: str = "string"


@dataclass(frozen=True, slots=True)
class Operation:
    """`gives` is what one answer, or each item of a list, or each line, looks like."""

    id: str
    method: str
    path: str
    role: Role
    summary: str
    handler: Handler
    gives: type[BaseModel]
    takes: type[BaseModel] | None = None
    is_list: bool = False
    is_lines: bool = False
    """It answers JSON lines."""
    status: int = 200
    idempotent: bool = False
    """A create: it honours Idempotency-Key."""
    conditional: bool = False
    """It gives an ETag, and honours If-Match where it changes something."""
    parameters: tuple[Parameter, ...] = field(default=())


PAGED = (Parameter("limit", "items on a page, 1 to 1000", "integer"), Parameter("after", "cursor of the page"))


def limit_of(query: Query, default: int = 100, most: int = 1000) -> int:
    """The page size asked for. Raises Unprocessable."""
    return int(number_of(query, "limit", default, 1, most))


def number_of(query: Query, name: str, default: float, least: float, most: float) -> float:
    """A number among the query parameters. Raises Unprocessable."""
    text = query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise Unprocessable(f"{name} must be a number from {least:g} to {most:g}", param=name)
    return value
