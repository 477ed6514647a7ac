"""Passes server-sent events on frame by frame, and takes the replica's usage comment out of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import msgspec

_USAGE = b": usage "
# A quote inside of a JSON string is escaped, so that a text about this can't look like it.
_CONTENT = re.compile(rb'"(?:content|text|arguments|reasoning_content)": ?"[^"]')
_MAX_FRAME = 1024 * 1024


class Usage(msgspec.Struct, frozen=True):
    """Tokens as a replica counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


_decode_usage = msgspec.json.Decoder(Usage).decode


def parse_usage(text: bytes | str) -> Usage | None:
    try:
        return _decode_usage(text)
    except msgspec.DecodeError:
        return None


@dataclass(slots=True)
class EventRelay:
    """Takes chunks as they come and gives back whole frames, at once.

    Only an unfinished frame is kept back, so that what a client has seen always ends at a frame's end, where an
    error frame may follow.
    """

    usage: Usage | None = None
    pieces: int = 0
    """Pieces of content that went by; a replica sends one a token, or one for several."""
    _rest: bytes = b""

    def feed(self, chunk: bytes) -> bytes:
        """The whole frames that `chunk` completes, without the usage comment."""
        data = self._rest + chunk if self._rest else chunk
        if data.endswith(b"\n\n"):
            self._rest = b""
        else:
            end = data.rfind(b"\n\n") + 2
            if end == 1:
                if len(data) <= _MAX_FRAME:
                    self._rest = data
                    return b""
                end = len(data)
            self._rest, data = data[end:], data[:end]
        self.pieces += len(_CONTENT.findall(data))
        return self._without_usage(data) if _USAGE in data else data

    def finish(self) -> bytes:
        """What was kept back, for a stream that ended in good order."""
        rest, self._rest = self._rest, b""
        return rest

    def _without_usage(self, data: bytes) -> bytes:
        kept = []
        for frame in data.split(b"\n\n"):
            if frame.startswith(_USAGE):
                self.usage = parse_usage(frame[len(_USAGE) :]) or self.usage
            else:
                kept.append(frame)
        return b"\n\n".join(kept)


def error_frame(body: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
