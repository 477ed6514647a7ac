"""openai-agents, over Responses: a run, a stream, a tool that is called."""

import asyncio

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
seen: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    seen.append(city)
    return "4 degrees"


async def main() -> None:
    settings = ModelSettings(temperature=0, max_tokens=60)
    plain = Agent(name="a", model="chat", instructions="Be brief.", model_settings=settings)
    assert (await Runner.run(plain, "What is the capital of France?")).final_output
    stream = Runner.run_streamed(plain, "What is the capital of France?")
    kinds = [event.type async for event in stream.stream_events()]
    assert "raw_response_event" in kinds
    forced = ModelSettings(temperature=0, max_tokens=60, tool_choice="required")
    tools = Agent(name="t", model="chat", tools=[get_weather], model_settings=forced)
    await Runner.run(tools, "Weather in Oslo?", max_turns=3)
    assert seen


asyncio.run(main())
print("responses: run, stream, tools")
