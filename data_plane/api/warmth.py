"""How warm a replica is, and its ways between the rungs: `POST /sleep`, `POST /wake`.

hot serves. asleep holds its weights in host memory and nothing of an accelerator. ember holds nothing but the processes
with all that they import.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from data_plane import log
from data_plane.engine.client import EngineClient
from data_plane.engine.messages import Ready, Rung, Warmed
from data_plane.errors import RequestError, StartError
from data_plane.text.chat_template import ChatTemplate
from data_plane.text.load import load_text
from data_plane.text.tokenizer import TextTokenizer

RESTING: tuple[Rung, ...] = ("ember", "asleep")
_WAIT_S = 3.0
"""How long an answer waits for the end of a way; it goes on without it."""
Loaded = Callable[[Ready, TextTokenizer, ChatTemplate | None], None]


class Warmth:
    """`on_load` is told what was loaded, each time that anything was. One move at a time."""

    def __init__(self, engine: EngineClient, path: Path) -> None:
        self._engine = engine
        self._path = path
        self.on_load: Loaded = lambda *_: None
        self._text: asyncio.Task[tuple[TextTokenizer, ChatTemplate | None]] | None = None
        self._move: asyncio.Task[None] | None = None
        self.rung: Rung = "hot"
        self.phases: dict[str, float] = {}
        """Milliseconds, of the last way up."""

    @property
    def moving(self) -> bool:
        return self._move is not None and not self._move.done()

    async def start(self, rung: Rung) -> Warmed:
        """Follow the engine to where it starts. Raises StartError, ModelUnreadable, UnsupportedModel."""
        opening = asyncio.create_task(self._engine.start())
        try:
            if rung != "ember":
                await self._read_text()
        except BaseException:
            opening.cancel()
            raise
        warmed = await opening
        await self._arrive(warmed)
        return warmed

    async def go(self, rung: Rung) -> None:
        """Begin to move, and wait for a while; joins a move that is under way. Raises StartError."""
        if self._move is not None and not self._move.done():
            await _wait(self._move)
        if self.rung != rung and not self.moving:
            self._move = asyncio.create_task(self._go(rung))
            await _wait(self._move)

    async def _go(self, rung: Rung) -> None:
        began = time.monotonic()
        before = self.rung
        if rung != "hot":
            self.rung = rung  # from now on nothing is taken
        warmed, _ = await asyncio.gather(self._engine.warm(rung), self._read_text() if rung != "ember" else _nothing())
        await self._arrive(warmed)
        total = time.monotonic() - began
        # the tokenizer is read beside the weights: what of it is left when they are there
        text = max(0.0, total - sum(warmed.phases.values()))
        phases = {**warmed.phases, "text": text, "total": total}
        self.phases = {name: round(seconds * 1000, 1) for name, seconds in phases.items()}
        log.event("warmth", before=before, now=rung, phases=self.phases)

    async def _read_text(self) -> tuple[TextTokenizer, ChatTemplate | None]:
        if self._text is None:
            self._text = asyncio.create_task(asyncio.to_thread(load_text, self._path))
        return await self._text

    async def _arrive(self, warmed: Warmed) -> None:
        if warmed.rung == "ember":
            self._text = None
        if warmed.ready is not None:
            self.on_load(warmed.ready, *await self._read_text())
        self.rung = warmed.rung


async def _wait(move: asyncio.Task[None]) -> None:
    await asyncio.wait({move}, timeout=_WAIT_S)
    if move.done():
        move.result()


async def _nothing() -> None:
    return None


def rung_of(body: bytes) -> Rung:
    """What `/sleep` is asked for: asleep where nothing is said. Raises RequestError."""
    try:
        given = json.loads(body) if body.strip() else {}
    except ValueError:
        raise RequestError("the body is not JSON", param="body") from None
    found = given.get("rung", "asleep") if isinstance(given, dict) else None
    for rung in RESTING:
        if found == rung:
            return rung
    raise RequestError("rung must be ember or asleep", param="rung")


def view(warmth: Warmth) -> Mapping[str, Any]:
    """What `/health` says of it."""
    return {"rung": warmth.rung, "moving": warmth.moving, "wake_phases": warmth.phases}


async def move(warmth: Warmth, rung: Rung) -> web.Response:
    try:
        await warmth.go(rung)
    except StartError as error:
        raise RequestError(str(error), code=error.code, status=503, type="server_error") from error
    return web.json_response(view(warmth), status=202 if warmth.moving else 200)
