"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from typing import Any

from aiohttp import web

from data_plane.api.context import REPLICA, Reply, respond
from data_plane.api.fields import Fields
from data_plane.api.pipeline import Delta, Prompt
from data_plane.api.sampling import read_generation
from data_plane.engine.messages import TokenLogprob
from data_plane.errors import RequestError
from data_plane.text.tokenizer import TextTokenizer

MOST_MESSAGES = 4096
_ROLES = ("system", "developer", "user", "assistant", "tool")


async def chat_completions(request: web.Request) -> web.StreamResponse:
    replica = request.app[REPLICA]
    fields = Fields.parse(await request.read())
    model = fields.string("model")
    replica.check_model(model, request.headers)
    if replica.template is None:
        raise RequestError("this model has no chat template; use /v1/completions", param="messages")
    _refuse_what_is_not_there(fields)
    messages = read_messages(fields)
    generation = read_generation(
        fields, replica.limits, logprobs=_logprobs(fields), default_max_tokens=replica.ready.max_model_len
    )
    size = sum(len(message["content"]) for message in messages)
    for message in messages:
        replica.check_characters(message["content"], "messages")
    template = replica.template
    tokens = await replica.off_loop(size, lambda: template.tokens(messages))
    replica.check_length(len(tokens), "messages")
    reply = ChatReply(model, replica.tokenizer, generation.choices, fields.boolean("logprobs"))
    return await respond(request, replica, reply, [Prompt(tokens)], generation)


def _refuse_what_is_not_there(fields: Fields) -> None:
    fields.refuse("tools", ([],), "this model's tools are not supported yet")
    fields.refuse("tool_choice", ("none", "auto"), "tool_choice needs tools, which are not supported yet")
    fields.refuse("functions", ([],), "functions are replaced by tools, which are not supported yet")
    fields.refuse("function_call", ("none", "auto"), "function_call is replaced by tools, which are not supported yet")
    fields.refuse("response_format", ({"type": "text"},), 'only response_format {"type": "text"} is supported yet')
    fields.refuse("modalities", (["text"],), "this model writes text only")
    fields.refuse("audio", (), "this model writes text only")


def _logprobs(fields: Fields) -> int:
    wanted = fields.boolean("logprobs")
    top = fields.optional_integer("top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if wanted else -1


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation with plain string contents: part lists are joined, null becomes empty, developer is system."""
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a non-empty array", param="messages")
    if len(value) > MOST_MESSAGES:
        raise RequestError(f"messages must hold at most {MOST_MESSAGES} entries", param="messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    if message.get("tool_calls"):
        raise RequestError(f"{where}.tool_calls is not supported yet", param=f"{where}.tool_calls")
    content = message.get("content")
    if content is None and role != "assistant":
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    text = _text(content, f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": text}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or an array of parts", param=where)
    texts = []
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"{at}: this model takes text parts only, not {kind!r}", param=at)
        text = part.get(part["type"])
        if not isinstance(text, str):
            raise RequestError(f"{at}.text must be a string", param=f"{at}.text")
        texts.append(text)
    return "".join(texts)


class ChatReply(Reply):
    """Chat's wire shapes."""

    operation = "chat"

    def __init__(self, model: str, tokenizer: TextTokenizer, choices: int, logprobs: bool) -> None:
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._choices = choices
        self._logprobs = logprobs

    def opening(self) -> list[dict[str, Any]]:
        return [
            self._chunk(index, {"role": "assistant", "content": "", "refusal": None}, None, None)
            for index in range(self._choices)
        ]

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        logprobs = self._entries(delta.logprobs) if self._logprobs and delta.logprobs else None
        if not delta.text and delta.finish is None and logprobs is None:
            return None
        content = {"content": delta.text} if delta.text else {}
        return self._chunk(delta.index, content, delta.finish, logprobs)

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None, logprobs: list[dict[str, Any]] | None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": finish,
        }
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def body(self, deltas: list[Delta]) -> dict[str, Any]:
        choices = []
        for index in range(self._choices):
            own = [delta for delta in deltas if delta.index == index]
            entries = [entry for delta in own for entry in self._entries(delta.logprobs)] if self._logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": {
                        "role": "assistant",
                        "content": "".join(delta.text for delta in own),
                        "refusal": None,
                    },
                    "logprobs": None if entries is None else {"content": entries, "refusal": None},
                    "finish_reason": own[-1].finish,
                }
            )
        return {**self._head, "object": "chat.completion", "choices": choices}

    def _entries(self, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            raw = self._tokenizer.bytes_of(token)
            return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

        return [
            {**entry(item.token, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]}
            for item in logprobs
        ]
