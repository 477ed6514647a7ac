"""langchain-openai: chat, stream, tools, structured output, embeddings."""

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Answer(BaseModel):
    capital: str


def get_weather(city: str) -> str:
    """The weather of a city."""
    return city


model = ChatOpenAI(model="chat", temperature=0, max_tokens=300, stream_usage=True)
assert "Paris" in model.invoke("What is the capital of France?").content
chunks = list(model.stream("What is the capital of France?"))
assert "Paris" in "".join(chunk.content for chunk in chunks)
assert any(chunk.usage_metadata for chunk in chunks)
called = model.bind_tools([get_weather], tool_choice="required").invoke("Weather in Oslo?")
assert called.tool_calls[0]["name"] == "get_weather"
assert isinstance(model.with_structured_output(Answer).invoke("What is the capital of France?"), Answer)
assert len(OpenAIEmbeddings(model="embed", check_embedding_ctx_length=False).embed_query("hello")) == 384
print("chat, stream, tools, structured output, embeddings")
