"""The engine's end of the Unix socket: blocking frames, drained as many as have come."""

from __future__ import annotations

import select
import socket

from data_plane.engine.messages import FRAME, MOST_FRAME_BYTES, FromEngine, ToEngine, frame, to_engine_decoder

_CHUNK = 1 << 16


class EngineSocket:
    """Not thread-safe: one loop owns it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    def receive(self, timeout_s: float) -> list[ToEngine] | None:
        """Whole messages that are there, waiting up to timeout_s for the first. None when the other side is gone."""
        wait = timeout_s
        messages: list[ToEngine] = []
        while select.select([self._socket], [], [], wait)[0]:
            try:
                chunk = self._socket.recv(_CHUNK)
            except ConnectionError:
                # it died with something of ours unread
                return None
            if not chunk:
                return None
            self._buffer += chunk
            messages += self._take()
            wait = 0.0
            if messages and len(chunk) < _CHUNK:
                break
        return messages

    def _take(self) -> list[ToEngine]:
        found: list[ToEngine] = []
        at = 0
        while len(self._buffer) - at >= FRAME.size:
            (size,) = FRAME.unpack_from(self._buffer, at)
            if size > MOST_FRAME_BYTES:
                raise ConnectionError(f"a frame of {size} bytes")
            if len(self._buffer) - at - FRAME.size < size:
                break
            start = at + FRAME.size
            found.append(to_engine_decoder.decode(memoryview(self._buffer)[start : start + size]))
            at = start + size
        if at:
            del self._buffer[:at]
        return found

    def send(self, messages: list[FromEngine]) -> bool:
        """Send a batch as one frame. False when the other side is gone."""
        try:
            self._socket.sendall(frame(messages))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True
