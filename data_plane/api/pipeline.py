"""The one way from engine outputs to text, for streams and plain replies alike.

bytes → UTF-8 hold-back → stop hold-back → delta. A plain reply is the join of the deltas that a stream would send.
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
from data_plane.text.stop import StopMatcher
from data_plane.text.tokenizer import TextTokenizer

_numbers = itertools.count()


@dataclass(frozen=True)
class Delta:
    """What one step added to one choice; `finish` on the last."""

    index: int
    text: str
    logprobs: list[TokenLogprob]
    finish: str | None


@dataclass
class Usage:
    """Counted once a request: the prompt once, the replies of all choices together. Times are CLOCK_MONOTONIC."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _Choice:
    def __init__(self, index: int, tokenizer: TextTokenizer, generation: Generation) -> None:
        self.index = index
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(generation.stops)

    def feed(self, output: Output) -> Delta:
        text = "".join(self._stops.feed(self._detokenizer.feed(token)) for token in output.tokens)
        finish: str | None = output.finish
        if self._stops.matched is not None:
            finish = "stop"
        elif finish is not None:
            text += self._stops.finish()
        return Delta(self.index, text, output.logprobs or [], finish)


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
                choices[index] = _Choice(index, tokenizer, generation)
                ids[index] = f"{next(_numbers)}"
                engine.submit(
                    ids[index], prompt.tokens, generation.for_choice(choice, room), salt,
                    lambda output, index=index, usage=prompt.usage: outputs.put_nowait((index, usage, output)),  # type: ignore[misc]
                )  # fmt: skip
        while ids:
            index, usage, output = await outputs.get()
            if index not in ids:
                continue
            if output.finish == "error":
                raise RequestError(
                    output.error or "the engine failed", code="engine_error", status=500, type="server_error"
                )
            _count(usage, output, clock.time())
            delta = choices[index].feed(output)
            if delta.finish is not None:
                id = ids.pop(index)
                if output.finish is None:
                    engine.abort([id])
            yield delta
    finally:
        engine.abort(list(ids.values()))


def _count(usage: Usage, output: Output, now: float) -> None:
    usage.completion_tokens += len(output.tokens)
    if usage.first_token_at == 0.0:
        usage.first_token_at = now
        usage.scheduled_at = output.scheduled_at
        usage.cached_tokens = output.cached_tokens
