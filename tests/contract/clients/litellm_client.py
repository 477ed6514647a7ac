"""litellm: chat, stream, tools, structured output, embeddings."""

import json
import os

import litellm

common = {"model": "openai/chat", "api_base": os.environ["OPENAI_BASE_URL"], "temperature": 0, "max_tokens": 60}
ask = [{"role": "user", "content": "What is the capital of France?"}]
tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
schema = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
assert "Paris" in litellm.completion(messages=ask, **common).choices[0].message.content
assert "Paris" in "".join(
    c.choices[0].delta.content or "" for c in litellm.completion(messages=ask, stream=True, **common)
)
called = litellm.completion(messages=ask, tools=[tool], tool_choice="required", **common)
assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
form = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema, "strict": True}}
assert "ok" in json.loads(litellm.completion(messages=ask, response_format=form, **common).choices[0].message.content)
vector = litellm.embedding(model="openai/embed", input=["hello"], api_base=os.environ["OPENAI_BASE_URL"])
assert len(vector.data[0]["embedding"]) == 384
print("chat, stream, tools, structured output, embeddings")
