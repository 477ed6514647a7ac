"""What the replica answers, against OpenAI's published types and those of Open Responses, strictly, with nothing extra.

The official client itself takes whatever comes; here its types validate, and a field that they do not know is a fault
unless it is one of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import openresponses_types
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

from tests.contract.conftest import Replica

OURS = {"reasoning_content", "max_model_len"}
ASK = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FUNCTION = {
    "name": "get_weather",
    "description": "tells the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"],
                   "additionalProperties": False},
}  # fmt: skip
FORCED = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 60}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "n": 2, "temperature": 1, "seed": 3},
    "tools": FORCED,
    "unused tools": {**FORCED, "tool_choice": "auto", "max_tokens": 12},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}},
    "seeded": {"seed": 1, "stop": ["x"], "user": "u", "metadata": {"a": "b"}},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "echo and logprobs": {"echo": True, "logprobs": 2},
    "several": {"prompt": ["a", "b"], "n": 2, "temperature": 1},
}
TOOL = {"type": "function", **FUNCTION}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"max_output_tokens": 200},
    "cut": {"max_output_tokens": 3},
    "logprobs": {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "max_output_tokens": 8},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "a named tool": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
    "schema": {"text": {"format": {"type": "json_schema", "name": "r", "schema": SCHEMA, "strict": True}}},
    "a conversation": {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "store": False, "max_output_tokens": 8,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    },
}  # fmt: skip


def post(replica: Replica, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(f"{replica.url}/v1/{path}", json={"model": "m", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def events(raw: str) -> list[str]:
    """The data of each event."""
    data = [line[6:] for frame in raw.split("\n\n") for line in frame.split("\n") if line.startswith("data: ")]
    return [item for item in data if item != "[DONE]"]


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check(raw: str | bytes, kind: Any, also: Any = None, also_raw: bytes = b"") -> Any:
    """Validate strictly. Every field must be known; where two standards are given, to one of them."""
    found = adapter(kind).validate_json(raw, strict=True)
    extra = set(unknown(found))
    if also is not None:
        extra &= set(unknown(adapter(also).validate_json(also_raw, strict=True)))
    extra = {name for name in extra if name.rpartition(".")[2] not in OURS}
    assert not extra, extra
    return found


def as_typed(raw: str | bytes) -> bytes:
    """A completion with the nulls replaced that OpenAI's service sends and its Python types leave out.

    They are the finish_reason of a chunk that is not the last, and what is told of a prompt's first token.
    """
    body = json.loads(raw)
    for choice in body["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        told = choice["logprobs"]
        if told and told["token_logprobs"][:1] == told["top_logprobs"][:1] == [None]:
            told["token_logprobs"][0], told["top_logprobs"][0] = 0.0, {}
    return json.dumps(body).encode()


def open_typed(raw: str | bytes) -> bytes:
    """Without the schema of a text format: Open Responses' types (2.4.0) have no place for one but null."""
    body = json.loads(raw)
    response = body.get("response", body)
    if response.get("object") == "response" and "schema" in response["text"]["format"]:
        response["text"]["format"]["schema"] = None
    return json.dumps(body).encode()


def unknown(value: Any, path: str = "") -> Iterator[str]:
    """Paths of fields that no type knows, anywhere below."""
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from unknown(item, path)
    elif isinstance(value, dict):
        for item in value.values():
            yield from unknown(item, path)


def test_a_field_that_is_not_known_is_found() -> None:
    body = {"id": "m", "object": "model", "created": 1, "owned_by": "x"}
    check(json.dumps(body), Model)
    with pytest.raises(AssertionError, match="surprise"):
        check(json.dumps({**body, "surprise": 1}), Model)
    with pytest.raises(ValueError, match="created"):
        check(json.dumps({**body, "created": "1"}), Model)


@pytest.mark.parametrize("case", CHATS)
def test_chat(case: str, replica: Replica) -> None:
    body = {**ASK, **CHATS[case]}
    plain = check(post(replica, "chat/completions", body).content, ChatCompletion)
    streamed = post(replica, "chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = [check(data, ChatCompletionChunk) for data in events(streamed.text)]
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert {choice.finish_reason for choice in plain.choices} <= {"stop", "length", "tool_calls"}


@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions(case: str, replica: Replica) -> None:
    body = {"prompt": "Once", "max_tokens": 6, "temperature": 0, **COMPLETIONS[case]}
    check(as_typed(post(replica, "completions", body).content), Completion)
    for data in events(post(replica, "completions", {**body, "stream": True}).text):
        check(as_typed(data), Completion)


@pytest.mark.parametrize("case", RESPONSES)
def test_responses_and_every_event(case: str, replica: Replica) -> None:
    body = {"input": "What is the capital of France?", "temperature": 0, **RESPONSES[case]}
    raw = post(replica, "responses", body).content
    plain = check(raw, Response, openresponses_types.ResponseResource, open_typed(raw))
    kinds = set()
    for data in events(post(replica, "responses", {**body, "stream": True}).text):
        event = check(data, ResponseStreamEvent, OPEN[json.loads(data)["type"]], open_typed(data))
        kinds.add(event.type)
    assert {"response.created", "response.in_progress", f"response.{plain.status}"} <= kinds


OPEN: dict[str, Any] = {
    next(iter(annotation)).value: kind
    for name in dir(openresponses_types)
    if name.endswith("StreamingEvent")
    and (kind := getattr(openresponses_types, name))
    and (annotation := kind.model_fields["type"].annotation)
}


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings(form: str, replica: Replica) -> None:
    raw = post(replica, "embeddings", {"input": ["a", "b"], "encoding_format": form}).content
    if form == "float":
        check(raw, CreateEmbeddingResponse)
    else:  # the client decodes these before it validates
        body = json.loads(raw)
        assert all(isinstance(item.pop("embedding"), str) for item in body["data"])
        told = {**body, "data": [{**item, "embedding": []} for item in body["data"]]}
        check(json.dumps(told), CreateEmbeddingResponse)


def test_models(replica: Replica) -> None:
    listed = httpx.get(f"{replica.url}/v1/models").json()
    assert listed.keys() == {"object", "data"}
    for card in [*listed["data"], httpx.get(f"{replica.url}/v1/models/m").json()]:
        check(json.dumps(card), Model)


@pytest.mark.parametrize(
    "body", [b"{", b'{"model": "x"}', b'{"model": "m"}', b'{"model": "m", "messages": [], "n": 0}']
)
def test_errors(body: bytes, replica: Replica) -> None:
    for path in ("chat/completions", "completions", "responses", "embeddings", "nowhere"):
        answer = httpx.post(f"{replica.url}/v1/{path}", content=body)
        assert 400 <= answer.status_code < 500
        assert answer.json().keys() == {"error"}
        check(json.dumps(answer.json()["error"]), ErrorObject)
