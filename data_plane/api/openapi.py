"""The OpenAPI 3.1 document of /v1, built from the tables and constants that validate requests."""

from __future__ import annotations

import json
from typing import Any

from data_plane.api import chat, completions, conversation, embeddings, responses, sampling, tools
from data_plane.api.openapi_replies import REPLIES
from data_plane.api.parameters import ModelLimits, Parameter, Schema
from data_plane.text.grammars import MOST_BYTES

VERSION = "3.1.0"
_TEXT: Schema = {"type": "string"}
_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_EFFORT: Schema = {"enum": [*conversation.EFFORTS, None]}
_NAME: Schema = {"type": "string", "pattern": f"^{tools.NAME.pattern}$"}


def document(limits: ModelLimits | None = None) -> dict[str, Any]:
    """limits: those of the model that is served; without them the document holds for any."""
    requests = {
        "/v1/chat/completions": (_chat(limits), "ChatCompletion", "ChatCompletionChunk"),
        "/v1/completions": (_completion(limits), "Completion", "Completion"),
        "/v1/responses": (_response(limits), "Response", "ResponseEvent"),
        "/v1/embeddings": (_embedding(limits), "Embeddings", ""),
    }
    paths: dict[str, Any] = {
        path: {"post": _operation(path, reply, chunk, _body(request))}
        for path, (request, reply, chunk) in requests.items()
    }
    paths["/v1/models"] = {"get": _operation("/v1/models", "Models")}
    paths["/v1/models/{id}"] = {
        "get": {
            **_operation("/v1/models/{id}", "Model"),
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
        }
    }
    return {
        "openapi": VERSION,
        "info": {"title": "ingle", "version": "1", "description": "OpenAI's API of one model."},
        "paths": paths,
        "components": {"schemas": REPLIES, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _operation(path: str, reply: str, chunk: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {"application/json": {"schema": _reference(reply)}}
    if chunk:
        told = {"type": "string", "contentMediaType": "application/json", "contentSchema": _reference(chunk)}
        content["text/event-stream"] = {
            "schema": _object(("data",), data={"anyOf": [told, {"const": "[DONE]"}]}, event=_TEXT)
        }
    failure = {"description": "refused or failed", "content": {"application/json": {"schema": _reference("Error")}}}
    operation: dict[str, Any] = {
        "operationId": path.removeprefix("/v1/").replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {"200": {"description": "done", "content": content}, "4XX": failure, "5XX": failure},
    }
    return operation if body is None else {**operation, "requestBody": body}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(schema: Schema) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _request(
    limits: ModelLimits | None, table: tuple[Parameter, ...], required: tuple[str, ...], **others: Schema
) -> Schema:
    plain = {parameter.name: parameter.schema(limits) for parameter in table}
    model: Schema = {"type": "string", "minLength": 1}
    return {"type": "object", "required": ["model", *required], "properties": {"model": model, **plain, **others}}


def _nullable(*choices: Schema) -> Schema:
    return {"anyOf": [*choices, {"type": "null"}]}


def _list(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _generation() -> dict[str, Schema]:
    """What chat and completions share besides plain fields."""
    stop: Schema = {"type": "string", "minLength": 1, "maxLength": sampling.MOST_STOP_CHARACTERS}
    bias: Schema = {"type": "number", "minimum": -sampling.LARGEST_BIAS, "maximum": sampling.LARGEST_BIAS}
    return {
        "stop": _nullable(stop, _list(stop, sampling.MOST_STOPS, 1)),
        "stop_token_ids": _nullable({**_TOKEN_IDS, "maxItems": sampling.MOST_STOP_TOKENS}),
        "logit_bias": _nullable(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]+$"},
                "additionalProperties": bias,
                "maxProperties": sampling.MOST_BIASES,
            }
        ),
        "stream_options": _nullable(_object((), include_usage={"type": ["boolean", "null"]})),
        **_bound_text(),
        "response_format": _format(nested=True),
    }


def _bound_text() -> dict[str, Schema]:
    grammar: Schema = {"type": ["string", "null"], "maxLength": MOST_BYTES}
    return {"regex": grammar, "grammar": {**grammar, "description": "in llguidance's dialect of Lark"}}


def _format(*, nested: bool) -> Schema:
    plain: list[Schema] = [_object(("type",), type={"const": kind}) for kind in ("text", "json_object")]
    inner = {"name": _NAME, "schema": {"type": "object"}, "strict": {"type": ["boolean", "null"]}}
    kind: Schema = {"const": "json_schema"}
    bound = (
        _object(("type", "json_schema"), type=kind, json_schema=_object(("name", "schema"), **inner))
        if nested
        else _object(("type", "name", "schema"), type=kind, **inner)
    )
    return _nullable(*plain, bound)


def _tools(*, nested: bool) -> dict[str, Schema]:
    function = {"name": _NAME, "description": {"type": ["string", "null"]}, "parameters": {"type": ["object", "null"]}}
    kind: Schema = {"const": "function"}
    tool = (
        _object(("type", "function"), type=kind, function=_object(("name",), **function))
        if nested
        else _object(("type", "name"), type=kind, **function)
    )
    named = (
        _object(("type", "function"), type=kind, function=_object(("name",), name=_NAME))
        if nested
        else _object(("type", "name"), type=kind, name=_NAME)
    )
    return {
        "tools": _nullable(_list(tool, tools.MOST_TOOLS)),
        "tool_choice": _nullable({"enum": ["none", "auto", "required"]}, named),
    }


def _parts(*kinds: str) -> Schema:
    return _nullable(
        _TEXT, {"type": "array", "items": _object(("type", "text"), type={"enum": list(kinds)}, text=_TEXT)}
    )


def _chat(limits: ModelLimits | None) -> Schema:
    call = _object(
        ("function",), id=_TEXT, type={"const": "function"},
        function=_object(("name",), name=_TEXT, arguments=_TEXT),
    )  # fmt: skip
    message = _object(
        ("role",), role={"enum": list(chat.ROLES)}, content=_parts("text"), tool_call_id=_TEXT,
        tool_calls=_nullable(_list(call, tools.MOST_TOOLS)),
    )  # fmt: skip
    table = (*sampling.SAMPLING, chat.LOGPROBS, chat.TOP_LOGPROBS, tools.PARALLEL)
    return _request(
        limits, table, ("messages",),
        messages=_list(message, chat.MOST_MESSAGES, 1),
        reasoning_effort=_EFFORT,
        chat_template_kwargs=_nullable(
            {
                "type": "object",
                "propertyNames": {"not": {"enum": list(conversation.OURS)}},
                "additionalProperties": {"type": ["string", "number", "boolean"]},
                "maxProperties": conversation.MOST_VARIABLES,
            }
        ),
        modalities=_nullable({"const": ["text"]}),
        **_refused("audio"),
        functions=_nullable({"const": []}),
        function_call={"enum": ["none", "auto", None]},
        **_tools(nested=True),
        **_generation(),
    )  # fmt: skip


def _completion(limits: ModelLimits | None) -> Schema:
    table = (*sampling.SAMPLING, completions.LOGPROBS, completions.ECHO, completions.BEST_OF)
    prompts = [_list(item, completions.MOST_PROMPTS, 1) for item in (_TEXT, _TOKEN_IDS)]
    return _request(
        limits, table, ("prompt",),
        prompt={"anyOf": [_TEXT, _TOKEN_IDS, *prompts]}, suffix={"enum": ["", None]}, **_generation(),
    )  # fmt: skip


def _response(limits: ModelLimits | None) -> Schema:
    message = _object(
        ("role", "content"), type={"const": "message"}, role={"enum": ["system", "developer", "user", "assistant"]},
        content=_parts("input_text", "output_text", "text"),
    )  # fmt: skip
    call = _object(
        ("type", "name", "call_id", "arguments"), type={"const": "function_call"}, name=_TEXT, call_id=_TEXT,
        arguments=_TEXT,
    )  # fmt: skip
    output = _object(
        ("type", "call_id", "output"), type={"const": "function_call_output"}, call_id=_TEXT,
        output=_parts("input_text", "output_text", "text"),
    )  # fmt: skip
    reasoning = _object(("type",), type={"const": "reasoning"})
    items = _list({"anyOf": [message, call, output, reasoning]}, chat.MOST_MESSAGES)
    table = (
        *sampling.COMMON,
        responses.MAX_OUTPUT_TOKENS,
        responses.MAX_TOOL_CALLS,
        chat.TOP_LOGPROBS,
        responses.STORE,
        tools.PARALLEL,
    )
    return _request(
        limits, table, (),
        input=_nullable(_TEXT, items),
        instructions={"type": ["string", "null"]},
        previous_response_id={"type": ["string", "null"], "minLength": 1},
        reasoning=_nullable(_object((), effort=_EFFORT)),
        text=_nullable(_object((), format=_format(nested=False))),
        metadata=_nullable({"type": "object", "maxProperties": responses.MOST_METADATA}),
        background={"enum": [False, None]},
        truncation={"enum": ["disabled", None]},
        include=_nullable({"enum": list(responses.INCLUDABLE)}),
        **{name: {"type": ["string", "null"]} for name in responses.LABELS},
        **_refused("conversation", "prompt"),
        **_tools(nested=False),
    )  # fmt: skip


def _embedding(limits: ModelLimits | None) -> Schema:
    text: Schema = {"type": "string", "minLength": 1}
    ids: Schema = {**_TOKEN_IDS, "minItems": 1}
    texts = [_list(item, embeddings.MOST_INPUTS, 1) for item in (text, ids)]
    return _request(
        limits, (), ("input",),
        input={"anyOf": [text, ids, *texts]}, encoding_format={"enum": [*embeddings.FORMS, None]},
        **_refused("dimensions"),
    )  # fmt: skip


def _refused(*names: str) -> dict[str, Schema]:
    """Fields that are known and cannot be honoured: only their absence is taken."""
    return {name: {"type": "null"} for name in names}


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
