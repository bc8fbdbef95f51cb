"""OpenAI's Agents SDK: an agent takes three steps, with chat completions and with responses, complete and streamed."""

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from tools import ASK, called

STEPS = list[str]()


def noted(name: str, **arguments: Any) -> str:
    """Record a tool call, and return the tool's result."""
    STEPS.append(called(name, arguments))
    return STEPS[-1]


@function_tool
def cities(country: str) -> str:
    """Cities of a country."""
    return noted("cities", country=country)


@function_tool
def weather(city: str, days: int) -> str:
    """The weather in a city."""
    return noted("weather", city=city, days=days)


@function_tool
def book(city: str) -> str:
    """Book a train."""
    return noted("book", city=city)


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    found: dict[str, Any] = {}
    for kind in OpenAIChatCompletionsModel, OpenAIResponsesModel:
        for streamed in False, True:
            STEPS.clear()
            agent = Agent(
                name="Guide",
                instructions="Be brief.",
                tools=[cities, weather, book],
                model=kind(model="caller", openai_client=client),
            )
            if streamed:
                result: Any = Runner.run_streamed(agent, ASK[0]["content"])
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, ASK[0]["content"])
            name = f"{kind.__name__}, {'streamed' if streamed else 'whole'}"
            found[name] = {"steps": [*STEPS], "final": result.final_output}
    print(json.dumps(found))


asyncio.run(main())
