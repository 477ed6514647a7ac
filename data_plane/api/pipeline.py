"""The one way from engine outputs to text, for streams and plain replies alike.

bytes → UTF-8 hold-back → stop hold-back → reasoning → tool calls → delta. A plain reply is the join of the deltas that
a stream would send.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from data_plane.api.sampling import Generation
from data_plane.engine.client import EngineClient
from data_plane.engine.messages import Output, TokenLogprob
from data_plane.errors import RequestError
from data_plane.text.detokenizer import Detokenizer
from data_plane.text.grammars import MOST_CALLS
from data_plane.text.reasoning import ReasoningSplitter
from data_plane.text.stop import StopMatcher
from data_plane.text.tokenizer import TextTokenizer
from data_plane.text.tool_calls import Call, Dialect, ToolCallParser

_numbers = itertools.count()
_MOST_PREEMPTIONS = 64


@dataclass(frozen=True)
class Delta:
    """What one step added to one choice; `prompt_logprobs` (where asked for) on the first, `finish` on the last."""

    index: int
    text: str
    logprobs: list[TokenLogprob]
    finish: str | None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Reading:
    """How a reply's text is to be understood. `shown`: control tokens that mark calls, with their spelling.

    `continues`: it goes on from the prompt's text, rather than being a text of its own.
    """

    dialect: Dialect | None = None
    tools: frozenset[str] = frozenset()
    most_calls: int = MOST_CALLS
    reasons: bool = False
    begins_inside: bool = False
    shown: dict[int, bytes] = field(default_factory=dict)
    continues: bool = False


@dataclass
class Usage:
    """Counted once a request: the prompt once, the replies of all choices together. Times are CLOCK_MONOTONIC."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When parts of the prompt ran, and of how many tokens."""
    preempted_at: list[float] = field(default_factory=list)
    """When a choice went on after it had given way to others."""

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _Choice:
    def __init__(self, index: int, tokenizer: TextTokenizer, generation: Generation, reading: Reading) -> None:
        self.index = index
        self._detokenizer = Detokenizer(tokenizer, reading.shown, continues=reading.continues)
        self._stops = StopMatcher(generation.stops)
        self._reasoning = ReasoningSplitter(reading.begins_inside) if reading.reasons else None
        self._tools = (
            ToolCallParser(reading.dialect, reading.tools, reading.most_calls) if reading.dialect is not None else None
        )

    def feed(self, output: Output) -> Delta:
        text = "".join(self._stops.feed(self._detokenizer.feed(token)) for token in output.tokens)
        finish: str | None = output.finish
        if self._stops.matched is not None:
            finish = "stop"
        elif finish is not None:
            text += self._stops.finish()
        reasoning, answer = self._split(text, finish is not None)
        answer, calls = self._parse(answer, finish is not None)
        if self._tools is not None and self._tools.calls and (finish == "stop" or self._tools.repeats):
            finish = "tool_calls"
        return Delta(self.index, answer, output.logprobs or [], finish, reasoning, tuple(calls), output.prompt_logprobs)

    def _split(self, text: str, last: bool) -> tuple[str, str]:
        if self._reasoning is None:
            return "", text
        reasoning, answer = self._reasoning.feed(text)
        if last:
            more, rest = self._reasoning.finish()
            return reasoning + more, answer + rest
        return reasoning, answer

    def _parse(self, text: str, last: bool) -> tuple[str, list[Call]]:
        if self._tools is None:
            return text, []
        shown, calls = self._tools.feed(text)
        if last:
            rest, more = self._tools.finish()
            return shown + rest, calls + more
        return shown, calls


@dataclass
class Prompt:
    """One prompt and the choices asked of it."""

    tokens: list[int]
    first_index: int = 0
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        self.usage = Usage(len(self.tokens))


async def generate(
    engine: EngineClient,
    tokenizer: TextTokenizer,
    prompts: list[Prompt],
    generation: Generation,
    *,
    max_model_len: int,
    salt: bytes,
    clock: asyncio.AbstractEventLoop,
    reading: Reading,
) -> AsyncGenerator[Delta]:
    """Run every choice of every prompt; yield deltas as they come, until each choice has finished.

    Whatever ends this generator, a client that left included, aborts what still runs. Raises RequestError when the
    engine fails.
    """
    outputs: asyncio.Queue[tuple[int, Usage, Output]] = asyncio.Queue()
    choices: dict[int, _Choice] = {}
    ids: dict[int, str] = {}
    try:
        for prompt in prompts:
            room = max_model_len - len(prompt.tokens)
            for choice in range(generation.choices):
                index = prompt.first_index + choice
                choices[index] = _Choice(index, tokenizer, generation, reading)
                ids[index] = f"{next(_numbers)}"
                engine.submit(
                    ids[index], prompt.tokens, generation.for_choice(choice, room), salt,
                    lambda output, index=index, usage=prompt.usage: outputs.put_nowait((index, usage, output)),  # type: ignore[misc]
                )  # fmt: skip
        while ids:
            index, usage, output = await outputs.get()
            if index not in ids:
                continue
            if output.finish in ("error", "refused"):
                raise failure(output)
            _count(usage, output, clock.time())
            delta = choices[index].feed(output)
            if delta.finish is not None:
                id = ids.pop(index)
                if output.finish is None:
                    engine.abort([id])
            yield delta
    finally:
        engine.abort(list(ids.values()))


def failure(output: Output) -> RequestError:
    if output.finish == "refused":
        return RequestError(output.error, code="impossible_constraint")
    return RequestError(output.error or "the engine failed", code="engine_error", status=500, type="server_error")


def _count(usage: Usage, output: Output, now: float) -> None:
    usage.completion_tokens += len(output.tokens)
    if usage.first_token_at == 0.0:
        usage.first_token_at = now
        usage.scheduled_at = output.scheduled_at
        usage.cached_tokens = output.cached_tokens
        usage.chunks = output.chunks or []
    if output.preempted and len(usage.preempted_at) < _MOST_PREEMPTIONS:
        usage.preempted_at.append(now)
