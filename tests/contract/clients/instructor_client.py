"""instructor: structured output through tools and through a JSON schema."""

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    capital: str


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(), mode=mode)
    found = client.chat.completions.create(
        model="chat", response_model=Answer, temperature=0, max_tokens=300,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
    )  # fmt: skip
    assert isinstance(found, Answer)
print("structured output by tools and by schema")
