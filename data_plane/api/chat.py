"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from aiohttp import web

from data_plane.api.context import REPLICA, Reply, respond
from data_plane.api.conversation import converse, read_variables
from data_plane.api.fields import Fields
from data_plane.api.logprobs import entries
from data_plane.api.parameters import Flag, ModelLimits, OptionalInteger
from data_plane.api.pipeline import Delta, Prompt
from data_plane.api.sampling import Generation, read_generation
from data_plane.api.tools import MOST_TOOLS, constrained, read_grammar, read_tools
from data_plane.errors import RequestError
from data_plane.text.tokenizer import TextTokenizer
from data_plane.text.tool_calls import Call

MOST_MESSAGES = 4096
LOGPROBS = Flag("logprobs")
TOP_LOGPROBS = OptionalInteger("top_logprobs", 0, 20)
ROLES = ("system", "developer", "user", "assistant", "tool")


async def chat_completions(request: web.Request) -> web.StreamResponse:
    replica = request.app[REPLICA]
    fields = Fields.parse(await request.read())
    model = fields.string("model")
    replica.check_model(model, request.headers)
    replica.check_generates()
    for name in ("functions", "function_call"):
        fields.refuse(name, ([], "none", "auto"), f"{name} is replaced by tools and tool_choice")
    fields.refuse("modalities", (["text"],), "this model writes text only")
    fields.refuse("audio", (), "this model writes text only")
    messages = read_messages(fields)
    use = read_tools(fields)
    variables = read_variables(fields)
    logprobs = _logprobs(fields, replica.limits)
    bound = (lambda: read_grammar(fields)) if constrained(fields) else None
    conversation = await converse(replica, messages, use, variables, bound, "response_format", "messages")
    generation = read_generation(
        fields,
        replica.limits,
        logprobs=logprobs,
        default_max_tokens=replica.ready.max_model_len,
        grammar=conversation.grammar,
    )
    reply = ChatReply(model, replica.tokenizer, generation, logprobs >= 0, use.forced)
    return await respond(request, replica, reply, [Prompt(conversation.tokens)], generation, conversation.reading)


def _logprobs(fields: Fields, limits: ModelLimits) -> int:
    wanted = LOGPROBS.read(fields)
    top = TOP_LOGPROBS.read(fields, limits)
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
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    calls = _past_calls(message.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else []
    content = message.get("content")
    if content is None and role != "assistant":
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    read = {"role": "system" if role == "developer" else role, "content": text_of(content, f"{where}.content")}
    if calls:
        read["tool_calls"] = calls
    if role == "tool":
        id = message.get("tool_call_id")
        if not isinstance(id, str):
            raise RequestError(f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id")
        read["tool_call_id"] = id
    return read


def _past_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Earlier calls, with their arguments as the object that templates expect, or as text where they are no JSON."""
    if not value:
        return []
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise RequestError(f"{where} must be an array of at most {MOST_TOOLS} calls", param=where)
    calls = []
    for place, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{place}] must hold a function with a name", param=f"{where}[{place}]")
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str):
            raise RequestError(f"{where}[{place}]: arguments must be a string", param=f"{where}[{place}]")
        try:
            parsed: Any = json.loads(arguments)
        except ValueError:
            parsed = arguments
        calls.append(
            {"id": str(call.get("id", "")), "type": "function",
             "function": {"name": function["name"], "arguments": parsed}}
        )  # fmt: skip
    return calls


def text_of(content: Any, where: str, kinds: tuple[str, ...] = ("text", "refusal")) -> str:
    """A string, or the join of text parts; null is empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or an array of parts", param=where)
    texts = []
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        if not isinstance(part, dict) or part.get("type") not in kinds:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"{at}: this model takes text parts only, not {kind!r}", param=at)
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(f"{at}.text must be a string", param=f"{at}.text")
        texts.append(text)
    return "".join(texts)


def _wire_call(call: Call) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class ChatReply(Reply):
    """Chat's wire shapes."""

    operation = "chat"

    def __init__(
        self, model: str, tokenizer: TextTokenizer, generation: Generation, logprobs: bool, calls_only: bool
    ) -> None:
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._choices = generation.choices
        self._include_usage = generation.include_usage
        self._logprobs = logprobs
        self._calls = [0] * generation.choices
        self._first_content = None if calls_only else ""

    def opening(self) -> list[dict[str, Any]]:
        return [
            self._chunk(index, {"role": "assistant", "content": self._first_content, "refusal": None}, None, None)
            for index in range(self._choices)
        ]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        logprobs = entries(self._tokenizer, delta.logprobs) if self._logprobs and delta.logprobs else None
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.calls:
            content["tool_calls"] = [
                {"index": self._next_call(delta.index), **_wire_call(call)} for call in delta.calls
            ]
        if not content and delta.finish is None and logprobs is None:
            return []
        return [self._chunk(delta.index, content, delta.finish, logprobs)]

    def _next_call(self, choice: int) -> int:
        self._calls[choice] += 1
        return self._calls[choice] - 1

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None, logprobs: list[dict[str, Any]] | None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": finish,
        }
        return self._framed([choice], None)

    def _framed(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        frame = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return {**frame, "usage": usage} if self._include_usage else frame

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._framed([], usage)] if self._include_usage else []

    def body(self, deltas: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index in range(self._choices):
            own = [delta for delta in deltas if delta.index == index]
            told = (
                [entry for delta in own for entry in entries(self._tokenizer, delta.logprobs)]
                if self._logprobs
                else None
            )
            text = "".join(delta.text for delta in own)
            calls = [_wire_call(call) for delta in own for call in delta.calls]
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
            if reasoning := "".join(delta.reasoning for delta in own):
                message["reasoning_content"] = reasoning
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": None if told is None else {"content": told, "refusal": None},
                    "finish_reason": own[-1].finish,
                }
            )
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}
