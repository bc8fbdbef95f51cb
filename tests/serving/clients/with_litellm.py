"""LiteLLM: a completion, a stream, three steps with tools, and the exception for a prompt that is too long."""

import json
import sys
from typing import Any

import litellm
from tools import ASK, TOOLS, called

GIVEN: dict[str, Any] = {"model": "openai/caller", "base_url": sys.argv[1], "api_key": "none", "num_retries": 0}
litellm.suppress_debug_info = True


def main() -> None:
    hello: list[Any] = [{"role": "user", "content": "Hello"}]
    whole = litellm.completion(messages=hello, temperature=0, drop_params=True, **GIVEN)
    pieces = litellm.completion(
        messages=hello, temperature=0, stream=True, stream_options={"include_usage": True}, **GIVEN
    )
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    messages: list[Any] = list(ASK)
    while calls := (
        message := litellm.completion(messages=messages, tools=TOOLS, **GIVEN).choices[0].message
    ).tool_calls:
        messages.append(message.model_dump())
        for call in calls:
            result = called(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
    again = litellm.completion(messages=ASK, tools=TOOLS, stream=True, **GIVEN)
    rebuilt = litellm.stream_chunk_builder([*again], messages=ASK)
    try:
        litellm.completion(messages=[{"role": "user", "content": "x" * 5000}], **GIVEN)
        error = ""
    except litellm.ContextWindowExceededError as caught:
        error = type(caught).__name__
    steps = [message["content"] for message in messages if message["role"] == "tool"]
    print(
        json.dumps(
            {
                "text": whole.choices[0].message.content,
                "streamed": streamed,
                "steps": steps,
                "final": message.content,
                "streamed call": rebuilt.choices[0].message.tool_calls[0].function.arguments,
                "too long": error,
            }
        )
    )


main()
