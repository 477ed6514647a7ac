"""The Responses route through the official client, on the real engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_create_and_go_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="What is the capital of France?", temperature=0)
    assert "Paris" in first.output_text
    assert first.status == "completed"
    assert first.usage is not None
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    second = client.responses.create(
        model="m", input="And of Italy?", previous_response_id=first.id, instructions="Be brief.", temperature=0
    )
    assert "Rome" in second.output_text
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.previous_response_id == first.id


def test_what_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    kept_not = client.responses.create(model="m", input="Hi", max_output_tokens=4, store=False)
    for id in (kept_not.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="m", input="x", previous_response_id=id)
        assert caught.value.code == "previous_response_not_found"


def test_a_stream_tells_the_same_as_the_plain_response(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "m", "input": "What is the capital of France?", "temperature": 0}
    plain = client.responses.create(**arguments)
    text, numbers, kinds = "", [], []
    final: Response | None = None
    for event in client.responses.create(**arguments, stream=True):
        numbers.append(event.sequence_number)
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.completed":
            final = event.response
    assert text == plain.output_text
    assert final is not None
    assert final.output_text == text
    assert numbers == list(range(len(numbers)))
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.completed"]  # fmt: skip


def test_a_cut_reply_is_incomplete(client: openai.OpenAI) -> None:
    cut = client.responses.create(model="m", input="Tell a long story.", max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_tools_call_and_take_results(client: openai.OpenAI) -> None:
    called = client.responses.create(
        model="m",
        input="Weather in Oslo?",
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=60,
    )
    call = called.output[-1]
    assert call.type == "function_call"
    assert "city" in json.loads(call.arguments)
    answered = client.responses.create(
        model="m",
        previous_response_id=called.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}],
        tools=[TOOL],
        max_output_tokens=20,
    )
    assert answered.usage is not None
    with client.responses.stream(
        model="m", input="Weather in Oslo?", tools=[TOOL], tool_choice="required", temperature=0
    ) as stream:
        final = stream.get_final_response()
    assert final.output[0].type == "function_call"


def test_a_format_binds_the_text(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    reply = client.responses.create(
        model="m", input="Is the sky blue?",
        text={"format": {"type": "json_schema", "name": "r", "schema": schema, "strict": True}},
    )  # fmt: skip
    assert set(json.loads(reply.output_text)) == {"ok"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "r", "schema": {}}}}, "text.format.schema"),
        ({"instructions": 3}, "instructions"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ],
)
def test_what_cannot_be_honoured_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "m", "input": "x", **fields})
    assert caught.value.param == param
