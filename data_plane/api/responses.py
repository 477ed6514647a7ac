"""POST /v1/responses: OpenAI's Responses, over the same conversation, engine and pipeline as chat."""

from __future__ import annotations

import json
import time
from typing import Any

from aiohttp import web

from data_plane.api.chat import MOST_MESSAGES, TOP_LOGPROBS, text_of
from data_plane.api.context import REPLICA, respond
from data_plane.api.conversation import Conversation, converse, effort_variables
from data_plane.api.fields import Fields
from data_plane.api.parameters import Bound, Flag, ModelLimits, OptionalInteger
from data_plane.api.pipeline import Prompt
from data_plane.api.response_reply import ResponseReply
from data_plane.api.response_store import Stored
from data_plane.api.sampling import COMMON, TEMPERATURE, TOP_P, read_generation
from data_plane.api.tools import ToolUse, format_grammar, read_tools
from data_plane.errors import RequestError

MAX_OUTPUT_TOKENS = OptionalInteger("max_output_tokens", 1, Bound.CONTEXT)
STORE = Flag("store", default=True)
MAX_TOOL_CALLS = OptionalInteger("max_tool_calls", 1, 1 << 31)
MOST_METADATA = 16
LABELS = ("user", "safety_identifier", "prompt_cache_key")
INCLUDABLE: tuple[list[str], ...] = ([], ["message.output_text.logprobs"], ["reasoning.encrypted_content"])


async def create_response(request: web.Request) -> web.StreamResponse:
    replica = request.app[REPLICA]
    fields = Fields.parse(await request.read())
    model = fields.string("model")
    replica.check_model(model, request.headers)
    replica.check_generates()
    _refuse(fields)
    owner = request.headers.get("x-ingle-cache-salt", "")
    earlier: list[dict[str, Any]] = []
    previous = fields.raw("previous_response_id")
    if previous is not None:
        earlier = replica.responses.messages(fields.string("previous_response_id"), owner, time.monotonic())
    messages = [*earlier, *read_input(fields.raw("input"))]
    if not messages:
        raise RequestError("input must be a string or a non-empty array of items", param="input")
    instructions = fields.optional_string("instructions")
    told = [{"role": "system", "content": instructions}] if instructions else []
    use = read_tools(fields)
    conversation = await _converse(request, fields, [*told, *messages], use)
    top = TOP_LOGPROBS.read(fields, replica.limits)
    logprobs = -1 if top is None else top
    most = MAX_OUTPUT_TOKENS.read(fields, replica.limits)
    generation = read_generation(
        fields.only(*(parameter.name for parameter in COMMON)),
        replica.limits,
        logprobs=logprobs,
        default_max_tokens=most or replica.ready.max_model_len,
        grammar=conversation.grammar,
    )

    def keep(reply: ResponseReply) -> None:
        replica.responses.put(Stored(reply.id, owner, [*messages, reply.as_message()]), time.monotonic())

    store = STORE.read(fields)
    reply = ResponseReply(
        _echo(fields, replica.limits, model, use, most), replica.tokenizer, logprobs >= 0, keep if store else None
    )
    return await respond(request, replica, reply, [Prompt(conversation.tokens)], generation, conversation.reading)


def _refuse(fields: Fields) -> None:
    fields.refuse("background", (False,), "background responses are not supported: read the stream")
    fields.refuse("truncation", ("disabled",), "nothing is truncated: send a shorter input")
    fields.refuse("conversation", (), "conversations are not kept: use previous_response_id")
    fields.refuse("prompt", (), "prompt templates are not kept here: send input")
    fields.refuse("include", INCLUDABLE, "include may only ask for message.output_text.logprobs")


async def _converse(request: web.Request, fields: Fields, messages: list[dict[str, Any]], use: ToolUse) -> Conversation:
    reasoning = fields.raw("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        raise RequestError("reasoning must be an object", param="reasoning")
    text = fields.raw("text")
    if text is not None and not isinstance(text, dict):
        raise RequestError("text must be an object", param="text")
    form = (text or {}).get("format")
    variables = effort_variables((reasoning or {}).get("effort"), "reasoning.effort")
    bound = None if form in (None, {"type": "text"}) else lambda: format_grammar(form, "text.format", nested=False)
    return await converse(request.app[REPLICA], messages, use, variables, bound, "text.format", "input")


def read_input(value: Any) -> list[dict[str, Any]]:
    """Items as chat messages: consecutive calls become one assistant message, outputs become tool messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MOST_MESSAGES:
        raise RequestError(f"input must be a string or an array of at most {MOST_MESSAGES} items", param="input")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(value):
        _add_item(messages, item, f"input[{place}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise RequestError(f"{where} must be an object", param=where)
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise RequestError(f"{where}.role must be system, developer, user or assistant", param=f"{where}.role")
        content = text_of(item.get("content"), f"{where}.content", ("input_text", "output_text", "text", "refusal"))
        messages.append({"role": "system" if role == "developer" else role, "content": content})
    elif kind == "function_call":
        name, id = item.get("name"), item.get("call_id")
        if not isinstance(name, str) or not isinstance(id, str) or not isinstance(item.get("arguments"), str):
            raise RequestError(f"{where} must have name, call_id and arguments as strings", param=where)
        try:
            arguments: Any = json.loads(item["arguments"])
        except ValueError:
            arguments = item["arguments"]
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        id = item.get("call_id")
        if not isinstance(id, str):
            raise RequestError(f"{where}.call_id is missing", param=f"{where}.call_id")
        content = text_of(item.get("output"), f"{where}.output", ("input_text", "output_text", "text"))
        messages.append({"role": "tool", "content": content, "tool_call_id": id})
    elif kind != "reasoning":
        # reasoning of an earlier turn is not shown to the model again
        raise RequestError(f"{where}: items of type {kind!r} are not supported", param=f"{where}.type")


def _echo(fields: Fields, limits: ModelLimits, model: str, use: ToolUse, most: int | None) -> dict[str, Any]:
    """What a Response repeats of its request."""
    metadata = fields.raw("metadata")
    if metadata is not None and (not isinstance(metadata, dict) or len(metadata) > MOST_METADATA):
        raise RequestError(f"metadata must be an object of at most {MOST_METADATA} entries", param="metadata")
    named = use.choice not in ("none", "auto", "required")
    return {
        "model": model,
        "instructions": fields.raw("instructions"),
        "max_output_tokens": most,
        "metadata": metadata or {},
        "parallel_tool_calls": use.parallel,
        "previous_response_id": fields.raw("previous_response_id"),
        "reasoning": {"effort": (fields.raw("reasoning") or {}).get("effort"), "summary": None},
        "store": STORE.read(fields),
        "temperature": TEMPERATURE.read(fields),
        "text": {"format": _echoed_format((fields.raw("text") or {}).get("format"))},
        "tool_choice": {"type": "function", "name": use.choice} if named else use.choice,
        "tools": [{"type": "function", "strict": True, **function} for function in use.functions],
        "top_logprobs": fields.raw("top_logprobs") or 0,
        "top_p": TOP_P.read(fields),
        "truncation": "disabled",
        "service_tier": "default",
        # there are no tools of our own to call, and none of these changes what a model says
        "max_tool_calls": MAX_TOOL_CALLS.read(fields, limits),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        **{name: fields.optional_string(name) for name in LABELS},
    }


def _echoed_format(form: dict[str, Any] | None) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    named = {"description": None, "strict": None, **form}
    kept = ("type", "name", "schema", "description", "strict") if form["type"] == "json_schema" else ("type",)
    return {name: named[name] for name in kept}
