"""Conversations with tools and structured outputs, with chat completions and responses, with OpenAI's client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
import torch

import onward
from onward import Decoder, LanguageModel, train_tokenizer
from onward.serving.chat import message_of
from onward.serving.responses import ResponsesRequest, messages_of
from onward.text import chat_of

from support.server import Running, serving

TEMPLATE = (
    "{% if tools %}T{{ tools | length }} call as <tool_call> {% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood or '' }}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
FLAT: list[Any] = [{"type": "function", **FUNCTION, "strict": True}]
CALL = r'<tool_call>\{"name": "weather", "arguments": \{"city": "(Oslo|Rome)"\}\}</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    torch.manual_seed(0)
    tokenizer = train_tokenizer("byte", ["a"])
    tokenizer.templates["default"] = TEMPLATE
    config = onward.DecoderConfig(tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2, context_length=256)
    return LanguageModel(Decoder(config).eval(), tokenizer)


@pytest.fixture(scope="module")
def server(lm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("models") / "caller"
    onward.save(lm, folder)
    with serving(folder, rows=2) as running:
        yield running
        assert running.idle()


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


CHOICES: dict[str, tuple[dict[str, Any], str]] = {  # fields of a request, expected finish reason
    "auto": ({"extra_body": {"regex": CALL}}, "tool_calls"),
    "required": ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_calls"),
    "named": ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "stop"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_call_is_read_from_the_answer(choice: str, stream: bool, client: openai.OpenAI) -> None:
    fields, expected = CHOICES[choice]
    given: dict[str, Any] = {"model": "caller", "messages": ASK, "tools": TOOLS, "seed": 1, **fields}
    if stream:
        deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
        calls = [call for delta in deltas for call in delta.delta.tool_calls or [] if call.id]
        pieces = [call for delta in deltas for call in delta.delta.tool_calls or [] if not call.id]
        for piece in pieces:
            calls[piece.index].function.arguments += piece.function.arguments
        content = "".join(delta.delta.content or "" for delta in deltas)
        reason = deltas[-1].finish_reason
    else:
        reply = client.chat.completions.create(**given).choices[0]
        calls, content, reason = reply.message.tool_calls, reply.message.content or "", reply.finish_reason
    assert (len(calls), content, reason) == (1, "", expected)
    assert calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments)["city"] in ("Oslo", "Rome")
    assert (calls[0].id[:5], calls[0].type) == ("call_", "function")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_response_streams_the_items_that_it_returns(choice: str, client: openai.OpenAI) -> None:
    fields = CHOICES[choice][0]
    given: dict[str, Any] = {"model": "caller", "input": ASK, "tools": FLAT, **fields}
    given["extra_body"] = {"seed": 1, **given.get("extra_body", {})}
    whole = client.responses.create(**given)
    (call,) = whole.output
    assert (call.type, call.name, json.loads(call.arguments)["city"] in ("Oslo", "Rome")) == (
        "function_call",
        "weather",
        True,
    )
    events = [*client.responses.create(**given, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output[0].arguments == call.arguments


def test_a_response_is_the_chat_s_answer(client: openai.OpenAI, lm: LanguageModel) -> None:
    given: dict[str, Any] = {"model": "caller", "input": "Hi", "instructions": "Be kind.", "max_output_tokens": 12}
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    expected = lm.chat(messages, 12, seed=5, temperature=1.0)
    whole = client.responses.create(**given, extra_body={"seed": 5})
    assert whole.output_text == expected
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 12
    kinds, text = [], ""
    for event in client.responses.create(**given, extra_body={"seed": 5}, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == expected
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


class Trip(pydantic.BaseModel):
    city: str = pydantic.Field(pattern="^(Oslo|Rome)$")


def test_openai_s_parse_returns_objects(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model="caller", messages=ASK, response_format=Trip, seed=2)
    assert reply.choices[0].message.parsed.city in ("Oslo", "Rome")
    response = client.responses.parse(model="caller", input="Where?", text_format=Trip)
    assert response.output_parsed.city in ("Oslo", "Rome")


def test_an_answer_continues_the_last_message(server: Running, lm: LanguageModel) -> None:
    messages = [*ASK, {"role": "assistant", "content": "It is "}]
    reply = server.post(
        "/v1/chat/completions", messages=messages, continue_final_message=True, max_tokens=6, seed=3, temperature=0.5
    )
    expected = lm.generate("[user]Weather?[assistant]It is", 6, seed=3, temperature=0.5)
    assert reply.json()["choices"][0]["message"]["content"] == expected


def test_earlier_calls_and_variables_reach_the_template(server: Running, lm: LanguageModel) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "wet"},
    ]
    reply = server.post(
        "/v1/chat/completions", messages=messages, chat_template_kwargs={"mood": "!"}, max_tokens=1, tools=TOOLS
    )
    text = "T1 call as <tool_call> [user]Weather?[assistant]Oslo[tool]wet[assistant]!"
    assert reply.json()["usage"]["prompt_tokens"] == len(lm.text().encode(text))
    items = [
        *ASK,
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c", "output": "wet"},
    ]
    own = server.post("/v1/responses", input=items, chat_template_kwargs={"mood": "!"}, tools=FLAT, max_output_tokens=1)
    assert own.json()["usage"]["input_tokens"] == len(lm.text().encode(text))


def test_tokens_are_those_of_the_template(server: Running, lm: LanguageModel) -> None:
    chat = chat_of(lm.text())
    assert server.post("/tokenize", messages=ASK).json()["tokens"] == chat.encode(ASK)
    variables: dict[str, Any] = {"tools": TOOLS, "chat_template_kwargs": {"mood": "!"}}
    given = server.post("/tokenize", messages=ASK, add_generation_prompt=False, **variables).json()
    assert given["tokens"] == chat.encode(ASK, False, tools=TOOLS, mood="!")
    messages = [*ASK, {"role": "assistant", "content": "Sun"}]
    begun = server.post("/tokenize", messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert begun.json()["tokens"] == chat.encode(messages, continue_final_message=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_log_probabilities_of_the_chat(stream: bool, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="caller", messages=ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    given: dict[str, Any] = {"model": "caller", "input": ASK, "max_output_tokens": 6, "temperature": 0}
    given |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        events = [*client.responses.create(**given, stream=True)]
        found = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        assert [one.token for one in events[-1].response.output[0].content[0].logprobs] == [one.token for one in found]
    else:
        found = client.responses.create(**given).output[0].content[0].logprobs
    expected = chat.choices[0].logprobs.content
    assert [one.token for one in found] == [one.token for one in expected]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert {len(one.top_logprobs) for one in found} == {2}


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a stored response": ("responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id is not"),
    "an image": ("responses", {"input": [{"type": "image"}]}, 'input[0] has the type "image"'),
    "an image in a message": (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        'input[0].content[0].type is "input_image"',
    ),
    "alternatives of nothing": ("responses", {"input": "a", "top_logprobs": 2}, "include lacks message.output_text"),
    "two answers": ("responses", {"input": "a", "n": 2}, "leave n out"),
    "no schema": ("chat/completions", {"messages": ASK, "response_format": {"type": "json_schema"}}, "has no schema"),
    "another form": ("chat/completions", {"messages": ASK, "response_format": {"type": "xml"}}, 'the type "xml"'),
    "a variable that is a field": (
        "chat/completions",
        {"messages": ASK, "chat_template_kwargs": {"messages": []}},
        "Cannot set messages in chat_template_kwargs",
    ),
    "nothing to continue": (
        "chat/completions",
        {"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True},
        "Cannot continue the last message",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_answered_is_named(name: str, server: Running) -> None:
    path, body, message = WRONG[name]
    reply = server.post(f"/v1/{path}", **body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


CALLED: list[Any] = [
    {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
    {"id": "b", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
]
RESULTS: list[Any] = [
    {"role": "tool", "tool_call_id": one["id"], "content": [{"type": "text", "text": "wet"}]} for one in CALLED
]
SPOKEN = {"role": "assistant", "content": "So. ", "reasoning_content": "Hm.", "tool_calls": CALLED}
ITEMS: list[Any] = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So. "}]},
    *({"type": "function_call", "call_id": one["id"], **one["function"]} for one in CALLED),
    *({"type": "function_call_output", "call_id": one["tool_call_id"], "output": "wet"} for one in RESULTS),
]


def test_successive_items_of_the_assistant_are_one_message() -> None:
    body = ResponsesRequest.model_validate({"input": [*ASK, *ITEMS, *ASK]})
    chat = [message_of(message, number) for number, message in enumerate([*ASK, SPOKEN, *RESULTS, *ASK])]
    assert messages_of(body) == chat
    later = [{"role": "assistant", "content": text} for text in ("A", "B")]
    assert [message["content"] for message in messages_of(ResponsesRequest.model_validate({"input": later}))] == [
        "A",
        "B",
    ]
    turns = [*ITEMS[2:3], *ITEMS[4:5], *ITEMS[3:4], *ITEMS[5:]]
    assert [message["role"] for message in messages_of(ResponsesRequest.model_validate({"input": turns}))] == [
        "assistant",
        "tool",
    ] * 2


def test_reasoning_is_given_in_parts_or_as_text() -> None:
    parts = [{"text": "H"}, {"text": None}, {}, {"text": "m"}]
    for given in (
        {"content": "Hm"},
        {"content": parts},
        {"summary": parts},
        {"summary": [*parts, 5, {"text": 5}, {"type": "other"}]},
    ):
        body = ResponsesRequest.model_validate({"input": [{"type": "reasoning", **given}]})
        assert messages_of(body) == [{"role": "assistant", "content": "", "reasoning_content": "Hm"}]
