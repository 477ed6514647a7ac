"""What a gateway reads of a request: its body, the endpoint and the bounds that the body names, how long to wait."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from control_plane.errors import InvalidInput, RequestTimeout, TooLarge

_MOST_TOKENS = 10_000_000
_MOST_CHOICES = 128
_LEAST_KEEP_ALIVE = 0.1
_NOTHING = msgspec.Raw(b"")


class Head(msgspec.Struct):
    """All that the gateway reads of a body."""

    model: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    stream: Any = None
    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING

    def beginning(self, size: int) -> bytes:
        """The first bytes of the prompt as it came, undecoded."""
        for part in (self.messages, self.prompt, self.input):
            if view := memoryview(part)[:size]:
                return view.tobytes()
        return b""

    def completion(self, usual: int) -> int:
        """Tokens that the reply may have; the `usual` where it doesn't say."""
        for value in (self.max_completion_tokens, self.max_tokens, self.max_output_tokens):
            if isinstance(value, int) and 0 < value < _MOST_TOKENS:
                usual = value
                break
        return usual * (self.n if isinstance(self.n, int) and 0 < self.n <= _MOST_CHOICES else 1)


NO_HEAD = Head()


_decode = msgspec.json.Decoder(Head).decode


async def read_body(request: web.BaseRequest, limit: int, silence: float, take: Callable[[int], None]) -> bytes:
    """All of a body of at most `limit` bytes; `take` is told of each part, and `silence` bounds the wait for one.

    Raises TooLarge, RequestTimeout, and what `take` raises.
    """
    too_large = TooLarge(f"the request's body is larger than {limit} bytes")
    if (request.content_length or 0) > limit:
        raise too_large
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = bytearray()
    content = request.content
    while True:
        if content.is_eof():  # most bodies come with their headers: there is nothing to wait for
            chunk = content.read_nowait()
        else:
            try:
                async with asyncio.timeout(silence):
                    chunk = await content.readany()
            except TimeoutError:
                raise RequestTimeout(f"the request's body stopped coming for {silence:g} s") from None
        if not chunk:
            return bytes(body)
        take(len(chunk))
        body += chunk
        if len(body) > limit:
            raise too_large


def read_head(body: bytes) -> Head | None:
    try:
        return _decode(body)
    except msgspec.DecodeError:
        return None


def model_of(body: bytes, head: Head | None) -> str:
    """The endpoint that a body names. Raises InvalidInput."""
    if head is not None:
        model = head.model
    else:
        # Python's parser takes NaN and Infinity too: the replica then says which parameter holds one.
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            raise InvalidInput("the request's body isn't valid JSON", code="invalid_json") from None
        if not isinstance(parsed, dict):
            raise InvalidInput("the request's body must be a JSON object", code="invalid_json") from None
        model = parsed.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidInput("you must provide a model parameter", code="missing_required_parameter", param="model")
    return model


def keep_alive_of(text: str | None, head: Head) -> float | None:
    """Seconds between comments while a stream is held; None where there shall be none. Raises InvalidInput."""
    if text is None or head.stream is not True:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _LEAST_KEEP_ALIVE <= seconds < math.inf:
        raise InvalidInput(
            f"x-ingle-keepalive must be a number of seconds, {_LEAST_KEEP_ALIVE:g} or more", param="x-ingle-keepalive"
        )
    return seconds


def wait_of(text: str | None, longest: float) -> float:
    """Seconds to hold at most: the endpoint's own bound, or less if the client says so. Raises InvalidInput."""
    if text is None:
        return longest
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidInput("x-ingle-wait must be a number of seconds, 0 or more", param="x-ingle-wait")
    return min(seconds, longest)
