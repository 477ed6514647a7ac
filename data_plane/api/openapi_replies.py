"""Schemas of what the routes answer. Replies of a real replica are tested against them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FINISH: Schema = {"enum": ["stop", "length", "tool_calls", None]}
_LOGPROB: Schema = {"type": "number", "maximum": 1e-6}


def _whole(*optional: str, **properties: Schema) -> Schema:
    """An object in which all but `optional` is always there."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _of(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _chosen(*optional: str, **properties: Schema) -> Schema:
    return _list(_whole(*optional, index=_COUNT, finish_reason=_FINISH, **properties))


_RIVAL = {"token": _TEXT, "logprob": _LOGPROB, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})}
_CHAT_LOGPROBS = _nullable(_whole(content=_list(_of("TokenLogprob")), refusal=_OPTIONAL_TEXT))
_FUNCTION = _whole(name=_TEXT, arguments=_TEXT)
_CALL = {"id": _TEXT, "type": {"const": "function"}, "function": _FUNCTION}
_USAGE = _whole(
    "prompt_tokens_details",
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_whole(cached_tokens=_COUNT),
)
_MESSAGE = _whole(
    "tool_calls", "reasoning_content",
    role={"const": "assistant"}, content=_OPTIONAL_TEXT, refusal=_OPTIONAL_TEXT, reasoning_content=_TEXT,
    tool_calls=_list(_whole(**_CALL)),
)  # fmt: skip
_DELTA_FIELDS: dict[str, Schema] = {
    "role": {"const": "assistant"}, "content": _OPTIONAL_TEXT, "refusal": _OPTIONAL_TEXT, "reasoning_content": _TEXT,
    "tool_calls": _list(_whole(index=_COUNT, **_CALL)),
}  # fmt: skip
_DELTA = _whole(*_DELTA_FIELDS, **_DELTA_FIELDS)
_HEAD = {"id": _TEXT, "created": _COUNT, "model": _TEXT}
_ARRAYS = _nullable(
    _whole(
        tokens=_list(_TEXT),
        token_logprobs=_list(_nullable(_LOGPROB)),
        top_logprobs=_list(_nullable({"type": "object", "additionalProperties": _LOGPROB})),
        text_offset=_list(_COUNT),
    )
)
_VECTOR: Schema = {"anyOf": [_list({"type": "number"}), _TEXT]}

REPLIES: dict[str, Schema] = {
    "Error": _whole(error=_whole(message=_TEXT, type=_TEXT, param=_OPTIONAL_TEXT, code=_OPTIONAL_TEXT)),
    "Usage": _USAGE,
    "TokenLogprob": _whole(**_RIVAL, top_logprobs=_list(_whole(**_RIVAL))),
    "ChatCompletion": _whole(
        **_HEAD, object={"const": "chat.completion"}, usage=_of("Usage"),
        choices=_chosen(message=_MESSAGE, logprobs=_CHAT_LOGPROBS),
    ),
    "ChatCompletionChunk": _whole(
        "usage", **_HEAD, object={"const": "chat.completion.chunk"}, usage=_nullable(_of("Usage")),
        choices=_chosen(delta=_DELTA, logprobs=_CHAT_LOGPROBS),
    ),
    "Completion": _whole(
        "usage", **_HEAD, object={"const": "text_completion"}, usage=_nullable(_of("Usage")),
        choices=_chosen(text=_TEXT, logprobs=_ARRAYS),
    ),
    "Response": _whole(
        id=_TEXT, object={"const": "response"}, created_at=_COUNT, model=_TEXT,
        status={"enum": ["in_progress", "completed", "incomplete", "failed"]},
        output=_list(_whole(type={"enum": ["message", "reasoning", "function_call"]}, id=_TEXT, status=_TEXT)),
        usage=_nullable(
            _whole(
                input_tokens=_COUNT, input_tokens_details=_whole(cached_tokens=_COUNT), output_tokens=_COUNT,
                output_tokens_details=_whole(reasoning_tokens=_COUNT), total_tokens=_COUNT,
            )
        ),
        error=_nullable(_whole(code=_TEXT, message=_TEXT)), incomplete_details=_nullable(_whole(reason=_TEXT)),
    ),
    "ResponseEvent": _whole(type={"type": "string", "pattern": "^response[.]"}, sequence_number=_COUNT),
    "Embeddings": _whole(
        object={"const": "list"}, model=_TEXT, usage=_whole(prompt_tokens=_COUNT, total_tokens=_COUNT),
        data=_list(_whole(object={"const": "embedding"}, index=_COUNT, embedding=_VECTOR)),
    ),
    "Model": _whole(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT),
    "Models": _whole(object={"const": "list"}, data=_list(_of("Model"))),
}  # fmt: skip
