"""What the handlers share, and the course that every generating request takes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from data_plane.api.parameters import ModelLimits
from data_plane.api.pipeline import Delta, Prompt, Reading, generate
from data_plane.api.response_store import ResponseStore
from data_plane.api.sampling import Generation
from data_plane.api.warmth import Warmth
from data_plane.config import ServeConfig
from data_plane.engine.client import EngineClient
from data_plane.engine.messages import Ready
from data_plane.errors import RequestError
from data_plane.observe import RequestTimes, Telemetry
from data_plane.text.chat_template import ChatTemplate
from data_plane.text.tokenizer import TextTokenizer

T = TypeVar("T")


def _give_way() -> None:
    """What a request asks of this thread must not take a core from the engine's steps, where cores are few."""
    with contextlib.suppress(OSError, AttributeError):  # a thread has a priority of its own on Linux only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


_SHORT_TEXT = 2000
_NICE = 10
ALWAYS = 1 << 30  # a size that goes off the loop
PLAIN = Reading()


@dataclass
class Replica:
    """Everything a request needs. `draining` refuses new work; `open` counts what is under way."""

    config: ServeConfig
    engine: EngineClient
    warmth: Warmth
    telemetry: Telemetry
    token: str | None
    ready: Ready = field(init=False)
    """This and the next two are there once the model was loaded; before, nothing is taken that needs them."""
    tokenizer: TextTokenizer = field(init=False)
    template: ChatTemplate | None = field(init=False)
    started_at: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    open: int = 0
    responses: ResponseStore = field(default_factory=ResponseStore)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenizer", _give_way))

    def __post_init__(self) -> None:
        self.warmth.on_load = self.load

    def load(self, ready: Ready, tokenizer: TextTokenizer, template: ChatTemplate | None) -> None:
        self.ready, self.tokenizer, self.template = ready, tokenizer, template
        self.telemetry.size(ready.num_blocks)

    @property
    def loaded(self) -> bool:
        return hasattr(self, "ready")

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.ready.max_model_len, self.ready.vocab_size)

    @property
    def name(self) -> str:
        return self.config.name

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Do text work beside the event loop when it is long enough to be felt there."""
        if size <= _SHORT_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)

    def check_prompt(self, tokens: list[int], param: str) -> None:
        """Refuse a prompt that leaves no room for a reply, or that the model cannot read."""
        self.check_length(len(tokens), param)
        self.check_tokens(tokens, param)

    def check_length(self, tokens: int, param: str) -> None:
        if tokens >= self.ready.max_model_len:
            raise RequestError(
                f"this model's context is {self.ready.max_model_len} tokens; the prompt has {tokens}, which "
                "leaves no room for a reply",
                param=param,
                code="context_length_exceeded",
            )

    def check_tokens(self, tokens: list[int], param: str) -> None:
        """Refuse no tokens, and tokens that the tokenizer knows and the model does not."""
        if not tokens:
            raise RequestError(f"{param} holds nothing that this model reads", param=param)
        if max(tokens) >= self.ready.vocab_size:
            raise RequestError(
                f"{param} holds the token {max(tokens)}, for which this model has no weights", param=param
            )

    def check_characters(self, text: str, param: str) -> None:
        """Refuse text that cannot fit whatever its tokens are, before time is spent on tokenizing it."""
        least = len(text) // self.tokenizer.longest_token
        if least > self.ready.max_model_len:
            raise RequestError(
                f"this model's context is {self.ready.max_model_len} tokens; the prompt has at least {least}",
                param=param,
                code="context_length_exceeded",
            )

    def check_generates(self) -> None:
        if not self.ready.generates:
            raise RequestError("this model makes embeddings only; use /v1/embeddings", param="model")

    def check_model(self, requested: str, headers: Any) -> None:
        if headers.get("x-ingle-model") != "override" and requested != self.name:
            raise RequestError(
                f"the model {requested!r} does not exist here; this replica serves {self.name!r}",
                param="model", code="model_not_found", status=404,
            )  # fmt: skip


class Reply(ABC):
    """How one route writes: the same deltas become a plain body or the frames of a stream."""

    operation = "chat"
    done = b"data: [DONE]\n\n"

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Frames before the first delta."""

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Frames that tell of a delta; may be none."""

    @abstractmethod
    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Frames after the last delta."""

    def failure(self, error: RequestError) -> dict[str, Any]:
        """The frame that ends a stream which failed after it began."""
        return dict(error.body())

    def frame(self, body: dict[str, Any]) -> bytes:
        return b"data: " + dump(body).encode() + b"\n\n"

    @abstractmethod
    def body(self, deltas: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain reply."""


async def respond(
    request: web.Request,
    replica: Replica,
    reply: Reply,
    prompts: list[Prompt],
    generation: Generation,
    reading: Reading = PLAIN,
) -> web.StreamResponse:
    """Generate and write the reply, streamed or plain; account for it however it ends."""
    received = request["received_at"]
    span = replica.telemetry.start_span(reply.operation, replica.name, request.headers)
    request["accounted"] = True
    error = ""
    deltas = generate(
        replica.engine, replica.tokenizer, prompts, generation,
        max_model_len=replica.ready.max_model_len,
        salt=header_bytes(request.headers.get("x-ingle-cache-salt", "")),
        clock=asyncio.get_running_loop(),
        reading=reading,
    )  # fmt: skip
    try:
        if generation.stream:
            return await _stream(request, reply, deltas, prompts)
        collected = [delta async for delta in deltas]
        usage = total_usage(prompts)
        headers = {"x-ingle-usage": dump(_meter(usage))} if request.headers.get("x-ingle-usage") else {}
        return web.json_response(reply.body(collected, usage), headers=headers, dumps=dump)
    except RequestError as failure:
        error = failure.code or "invalid_request"
        raise
    except (asyncio.CancelledError, ConnectionError):
        error = "cancelled"
        raise
    except Exception:
        error = "internal_error"
        raise
    finally:
        await deltas.aclose()
        now = time.monotonic()
        firsts = [prompt.usage for prompt in prompts if prompt.usage.first_token_at]
        times = RequestTimes(
            received,
            min((usage.scheduled_at for usage in firsts), default=0.0),
            min((usage.first_token_at for usage in firsts), default=0.0),
            now,
            [chunk for usage in firsts for chunk in usage.chunks],
            [at for usage in firsts for at in usage.preempted_at],
        )
        counted = total_usage(prompts)
        replica.telemetry.finish(
            span, reply.operation, times, counted["prompt_tokens"], counted["completion_tokens"], error
        )


def total_usage(prompts: list[Prompt]) -> dict[str, Any]:
    bodies = [prompt.usage for prompt in prompts]
    prompt_tokens = sum(usage.prompt_tokens for usage in bodies)
    completion_tokens = sum(usage.completion_tokens for usage in bodies)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in bodies)},
    }


def _meter(usage: dict[str, Any]) -> dict[str, Any]:
    """What the gateway's meter reads."""
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }


async def _stream(
    request: web.Request, reply: Reply, deltas: AsyncIterator[Delta], prompts: list[Prompt]
) -> web.StreamResponse:
    """Server-sent events. The headers leave with the first delta, so that an early failure is a plain error."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache",
                 "x-request-id": request["id"]}
    )  # fmt: skip

    def metered() -> bytes:
        """What the gateway's meter reads, and takes out."""
        if not request.headers.get("x-ingle-usage"):
            return b""
        return b": usage " + dump(_meter(total_usage(prompts))).encode() + b"\n\n"

    started = False
    try:
        async for delta in deltas:
            frames = reply.chunks(delta)
            data = b""
            if not started:
                await response.prepare(request)
                started = True
                frames = [*reply.opening(), *frames]
                # the prompt is known from the start: a stream that is cut can still be metered
                data = metered()
            data += b"".join(map(reply.frame, frames))
            if data:
                await response.write(data)
    except RequestError as failure:
        if not started:
            raise
        await response.write(reply.frame(reply.failure(failure)))
        await response.write_eof()
        return response
    usage = total_usage(prompts)
    tail = b"".join(map(reply.frame, reply.closing(usage)))
    await response.write(tail + metered() + reply.done)
    await response.write_eof()
    return response


def header_bytes(value: str) -> bytes:
    """A header's value as it came: bytes that are no UTF-8 are kept by aiohttp as surrogates."""
    return value.encode("utf-8", "surrogateescape")


def dump(body: Any) -> str:
    return msgspec.json.encode(body).decode()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REPLICA = web.AppKey("replica", Replica)
