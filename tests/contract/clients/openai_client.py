"""openai: chat, stream, tools, structured output, responses (plain, streamed, parsed), completions, embeddings."""

import openai
from pydantic import BaseModel


class Answer(BaseModel):
    ok: bool


client = openai.OpenAI(max_retries=0)
ask = [{"role": "user", "content": "What is the capital of France?"}]
function = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
common = {"model": "chat", "temperature": 0}

chat = client.chat.completions
assert "Paris" in chat.create(messages=ask, max_tokens=60, **common).choices[0].message.content
with chat.stream(messages=ask, max_tokens=60, **common) as stream:
    text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert "Paris" in text
    assert stream.get_final_completion().choices[0].message.content == text

tools = [{"type": "function", "function": function}]
called = chat.create(messages=ask, tools=tools, tool_choice="required", max_tokens=60, **common).choices[0]
assert (called.finish_reason, called.message.tool_calls[0].function.name) == ("tool_calls", "get_weather")

parsed = chat.parse(messages=ask, response_format=Answer, **common).choices[0].message.parsed
assert isinstance(parsed, Answer)

first = client.responses.create(input="What is the capital of France?", **common)
assert "Paris" in first.output_text
with client.responses.stream(input="What is the capital of France?", **common) as stream:
    deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == deltas == first.output_text
assert isinstance(client.responses.parse(input="Fine?", text_format=Answer, **common).output_parsed, Answer)
forced = client.responses.create(
    input="Weather in Oslo?", tools=[{"type": "function", **function}], tool_choice="required", **common
)
assert forced.output[0].name == "get_weather"

assert (
    client.completions.create(prompt="Once upon a", max_tokens=5, logprobs=2, echo=True, **common).choices[0].logprobs
)
vectors = client.embeddings.create(model="embed", input=["hello", "goodbye"]).data
assert [len(item.embedding) for item in vectors] == [384, 384]
assert {"chat", "embed"} <= {model.id for model in client.models.list()}
try:
    chat.create(messages=[], **common)
    raise AssertionError("no messages were taken for some")
except openai.BadRequestError as error:
    assert error.param == "messages"  # noqa: PT017
print("chat, stream, tools, structured output, responses, completions, embeddings")
