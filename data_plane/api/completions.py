"""POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from typing import Any

from aiohttp import web

from data_plane.api.context import ALWAYS, REPLICA, Replica, Reply, respond
from data_plane.api.fields import Fields
from data_plane.api.parameters import Flag, OptionalInteger
from data_plane.api.pipeline import Delta, Prompt, Reading
from data_plane.api.sampling import MOST_CHOICES, Generation, check_token, read_generation
from data_plane.api.tools import constrained, read_grammar
from data_plane.engine.messages import TokenLogprob
from data_plane.errors import RequestError
from data_plane.text.tokenizer import TextTokenizer

_DEFAULT_MAX_TOKENS = 16
MOST_PROMPTS = 256
LOGPROBS = OptionalInteger("logprobs", 0, 5)
_MOST_SCORED_CONTEXTS = 4
ECHO = Flag("echo")
BEST_OF = OptionalInteger("best_of", 1, MOST_CHOICES)


async def completions(request: web.Request) -> web.StreamResponse:
    replica = request.app[REPLICA]
    fields = Fields.parse(await request.read())
    model = fields.string("model")
    replica.check_model(model, request.headers)
    replica.check_generates()
    fields.refuse("suffix", ("",), "suffix (insertion) is not supported by this model")
    logprobs = LOGPROBS.read(fields, replica.limits)
    echo = ECHO.read(fields)
    scored = echo and logprobs is not None
    generation = read_generation(
        fields,
        replica.limits,
        logprobs=-1 if logprobs is None else logprobs,
        default_max_tokens=min(_DEFAULT_MAX_TOKENS, replica.ready.max_model_len),
        grammar=await replica.off_loop(ALWAYS, lambda: read_grammar(fields)) if constrained(fields) else "",
        score_prompt=scored,
    )
    if BEST_OF.read(fields, replica.limits) not in (None, generation.choices):
        raise RequestError("best_of other than n is not supported", param="best_of")
    prompts = await _read_prompts(fields, replica)
    if len(prompts) * generation.choices > MOST_CHOICES:
        raise RequestError(f"prompts times n must be at most {MOST_CHOICES}", param="n")
    most = _MOST_SCORED_CONTEXTS * replica.ready.max_model_len
    if scored and sum(len(prompt.tokens) for prompt in prompts) * generation.choices > most:
        raise RequestError(f"with echo and logprobs, all prompts times n must be at most {most} tokens", param="echo")
    for place, prompt in enumerate(prompts):
        prompt.first_index = place * generation.choices
    reply = CompletionReply(model, replica.tokenizer, prompts, generation, echo, logprobs is not None)
    return await respond(request, replica, reply, prompts, generation, Reading(continues=True))


async def _read_prompts(fields: Fields, replica: Replica) -> list[Prompt]:
    """A string, an array of strings, an array of token ids, or an array of such arrays."""
    value = fields.raw("prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RequestError("prompt must be a string or an array of strings or token ids", param="prompt")
    if len(value) > MOST_PROMPTS:
        raise RequestError(f"prompt must hold at most {MOST_PROMPTS} prompts", param="prompt")
    prompts = []
    for item in value:
        if isinstance(item, str):
            replica.check_characters(item, "prompt")
            tokens = [*replica.tokenizer.bos_ids, *await replica.off_loop(len(item), lambda item=item: (  # type: ignore[misc]
                replica.tokenizer.encode(item)))]  # fmt: skip
        elif isinstance(item, list):
            replica.check_length(len(item), "prompt")
            tokens = [check_token(token, replica.limits, "prompt") for token in item]
        else:
            raise RequestError("prompt must be a string or an array of strings or token ids", param="prompt")
        if not tokens:
            eos = replica.ready.eos_token_ids
            tokens = list(replica.tokenizer.bos_ids) or eos[:1]
        replica.check_prompt(tokens, "prompt")
        prompts.append(Prompt(tokens))
    return prompts


class CompletionReply(Reply):
    """Completions' wire shapes. Logprobs are parallel arrays, with offsets into the text."""

    operation = "text_completion"

    def __init__(
        self,
        model: str,
        tokenizer: TextTokenizer,
        prompts: list[Prompt],
        generation: Generation,
        echo: bool,
        logprobs: bool,
    ) -> None:
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._total = len(prompts) * generation.choices
        self._include_usage = generation.include_usage
        self._echoes = [
            self._echo(prompt.tokens) if echo else "" for prompt in prompts for _ in range(generation.choices)
        ]
        self._scored = echo and logprobs
        self._prompts = [prompt.tokens for prompt in prompts for _ in range(generation.choices)]
        self._written = [0 if self._scored else len(echoed) for echoed in self._echoes]

    def _echo(self, tokens: list[int]) -> str:
        text = self._text(tokens)
        return text.removeprefix(" ") if self._tokenizer.strips_first_space else text

    def _text(self, tokens: list[int]) -> str:
        return b"".join(self._tokenizer.bytes_of(token) for token in tokens).decode("utf-8", "replace")

    def opening(self) -> list[dict[str, Any]]:
        if self._scored:
            return []  # the echo comes with each choice's first delta, which says how likely it was
        return [self._chunk(index, text, None, None) for index, text in enumerate(self._echoes) if text]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        index = delta.index
        echoes = []
        if delta.prompt_logprobs is not None:
            told = self._arrays(index, [self._prompts[index][0], *delta.prompt_logprobs])
            echoes.append(self._chunk(index, self._echoes[index], None, told))
        entries = self._arrays(index, [*delta.logprobs]) if self._logprobs and delta.logprobs else None
        if not delta.text and delta.finish is None and entries is None:
            return echoes
        return [*echoes, self._chunk(index, delta.text, delta.finish, entries)]

    def _chunk(self, index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._framed([choice], None)

    def _framed(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        frame = {**self._head, "choices": choices}
        return {**frame, "usage": usage} if self._include_usage else frame

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._framed([], usage)] if self._include_usage else []

    def body(self, deltas: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index in range(self._total):
            own = [delta for delta in deltas if delta.index == index]
            items: list[TokenLogprob | int] = [item for delta in own for item in delta.logprobs]
            if self._scored:
                items = [self._prompts[index][0], *(own[0].prompt_logprobs or []), *items]
            choices.append(
                {
                    "index": index,
                    "text": self._echoes[index] + "".join(delta.text for delta in own),
                    "logprobs": self._arrays(index, items) if self._logprobs else None,
                    "finish_reason": own[-1].finish,
                }
            )
        return {**self._head, "choices": choices, "usage": usage}

    def _arrays(self, index: int, items: list[TokenLogprob | int]) -> dict[str, Any]:
        """items: what is told of each token; of a prompt's first there is nothing but its id."""
        tokens, offsets, own, rivals = [], [], [], []
        for item in items:
            known = item if isinstance(item, TokenLogprob) else None
            text = self._text([item if isinstance(item, int) else item.token])
            tokens.append(text)
            offsets.append(self._written[index])
            self._written[index] += len(text)
            own.append(known.logprob if known else None)
            rivals.append({self._text([token]): logprob for token, logprob in known.top} if known else None)
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": rivals, "text_offset": offsets}
