"""pydantic-ai, over Responses and over chat: a run, a stream, structured output."""

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


class Answer(BaseModel):
    capital: str


async def main() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatModel):
        agent = Agent(kind("chat"), model_settings={"temperature": 0, "max_tokens": 60})
        assert "Paris" in (await agent.run("What is the capital of France?")).output
        async with agent.run_stream("What is the capital of France?") as stream:
            assert "Paris" in [text async for text in stream.stream_text()][-1]
        bound = Agent(
            kind("chat"), output_type=NativeOutput(Answer), model_settings={"temperature": 0, "max_tokens": 60}
        )
        assert isinstance((await bound.run("What is the capital of France?")).output, Answer)


asyncio.run(main())
print("responses and chat: run, stream, structured output")
