"""Replies with calls and reasoning: a stream, a complete reply and a response have the same content, in every
format."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from onward.generation.logprobs import TokenLogprob
from onward.serving.jobs import Update, by_token, merged

from support.calls import random_text
from support.server import Running, serving
from support.talkers import SHOWN, Reply, chat, respond, script, talker

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NAMES = "weather", "time"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
ASK = [{"role": "user", "content": "Hi"}]
ARGUMENTS = '{"city": "Oslo </tool_call> ü"}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
TIME = '{"name": "time", "arguments": {}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{TIME}</tool_call>"
TAGS = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo </tool_call> ü\n</parameter>\n</function>\n</tool_call>"
SPOKEN = f"commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
ONE, BOTH = [("weather", ARGUMENTS)], [("weather", ARGUMENTS), ("time", "{}")]
ANSWERS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {  # model: answer, reasoning, content, calls
    "hermes": (f"So. {HERMES}", "", "So. ", BOTH),
    "mistral": (f"[TOOL_CALLS] [{CALL}, {TIME}]", "", "", BOTH),
    "mistral_args": (f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}", "", "", BOTH),
    "llama3_json": (CALL.replace("arguments", "parameters"), "", "", ONE),
    "qwen3_coder": (TAGS, "", "", ONE),
    "harmony": (f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>{SPOKEN}", "Hm", "", ONE),
    "json": (f"[{CALL}, {TIME}]", "", "", BOTH),
    "hermes-think": (f"<think>\nHm {HERMES}\n</think>\n\nSo. {HERMES}", f"Hm {HERMES}", "So. ", BOTH),
    "open-think": (f"Hm\n</think>\n\n{HERMES}", "Hm", "", BOTH),
    "mistral-think": (f"[THINK]Hm[/THINK][TOOL_CALLS][{CALL}]", "Hm", "", ONE),
}

BEGUN = re.compile(r"[<\[][^ ]*$")  # a marker that is cut off


@pytest.fixture(scope="module", params=["text", "control tokens"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("models")
    texts, controls = [text for text, *_ in ANSWERS.values()], request.param != "text"
    with serving([talker(folder, name, controls, texts) for name in SHOWN], rows=2) as running:
        yield running
        assert running.idle()


def asked(server: Running, model: str, text: str, **more: Any) -> list[Reply]:
    """The replies with a scripted answer from chat completions and from responses, each complete and streamed."""
    body = {"model": model, **script(server, model, text), **more}
    limit = body.pop("max_tokens", None)
    chatted = body | {"messages": ASK, "tools": TOOLS, "max_tokens": limit}
    responded = body | {"input": ASK, "tools": FLAT, "max_output_tokens": limit}
    return [
        *(chat(server, stream, **chatted) for stream in (False, True)),
        *(respond(server, stream, **responded) for stream in (False, True)),
    ]


@pytest.mark.parametrize("model", ANSWERS)
def test_all_replies_have_the_reasoning_content_and_calls_of_the_answer(model: str, server: Running) -> None:
    text, reasoning, content, calls = ANSWERS[model]
    whole, streamed, response, streamed_response = asked(server, model, text)
    for reply in whole, streamed, response, streamed_response:
        found = [part.replace("\n", "") for part in (reply.reasoning, reply.content)]
        assert [*found, reply.calls] == [unescaped(reasoning, server, model), content, calls]
    assert whole.parts == streamed.parts
    assert response.parts == streamed_response.parts
    assert (whole.finish_reason, response.finish_reason) == ("tool_calls", "completed")
    details = whole.usage["completion_tokens_details"], response.usage["output_tokens_details"]
    least = len(script(server, model, reasoning)["forced_tokens"]) - 1
    for detail in details:  # markers that consist of several tokens may also count
        assert least <= detail["reasoning_tokens"] <= least + (25 if reasoning else 0)


def unescaped(text: str, server: Running, model: str) -> str:
    """The text of an answer as in a reply, without control tokens."""
    tokenizer = next(one for one in server.served if one.name == model).lm.text()
    forced: list[int] = script(server, model, text)["forced_tokens"]
    return tokenizer.decode(forced).replace("\n", "")


def test_a_call_is_streamed_with_its_name_first_and_its_arguments_as_they_come(server: Running) -> None:
    streamed = chat(server, True, model="hermes", messages=ASK, tools=TOOLS, **script(server, "hermes", HERMES))
    first = streamed.kinds.index("call")
    assert streamed.kinds[: first + 1] == ["call"]
    assert streamed.kinds.count("arguments") > 5


@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.long)])
def test_a_cut_answer_has_its_calls_and_never_their_json(count: int, server: Running) -> None:
    generator = random.Random(46)
    for _ in range(count):
        model = generator.choice([*ANSWERS])
        text, _, content, calls = ANSWERS[model]
        forced = script(server, model, text)["forced_tokens"]
        limit = generator.randrange(1, len(forced) - 1)
        replies = asked(server, model, text, max_tokens=limit)
        assert replies[0].parts == replies[1].parts
        assert replies[2].parts == replies[3].parts
        assert [reply.finish_reason for reply in replies] == ["length"] * 2 + ["incomplete"] * 2
        for reply in replies:
            assert content.startswith(BEGUN.sub("", reply.content))
            whole = reply.calls[:-1]
            assert whole == calls[: len(whole)]
        assert replies[0].calls == replies[2].calls


STOPS = "Oslo", "ool", "</think>", "\n", "}", "name", "Hm", "w1w"


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.long)])
def test_all_replies_to_a_random_request_have_the_same_content(count: int, server: Running) -> None:
    choose = random.Random(48)
    for _ in range(count):
        model = choose.choice([*SHOWN])
        text = choose.choice([ANSWERS[model][0], ""]) + random_text(choose)
        options: dict[str, Any] = {
            "max_tokens": choose.randrange(1, 60),
            "stop": choose.sample(STOPS, 2),
            "include_stop_str_in_output": True,
            "include_reasoning": False,
            "reasoning_format": "none",
            "parallel_tool_calls": False,
            "tool_choice": "none",
        }
        more = {name: value for name, value in options.items() if choose.random() < 0.25}
        whole, streamed, response, streamed_response = asked(server, model, text, **more)
        assert whole.parts == streamed.parts
        assert response.parts == streamed_response.parts
        assert response.kinds == streamed_response.kinds
        assert whole.parts[:3] == response.parts[:3]


@pytest.mark.parametrize("model", ANSWERS)
def test_one_call_is_read_if_the_request_takes_one(model: str, server: Running) -> None:
    for reply in asked(server, model, ANSWERS[model][0], parallel_tool_calls=False):
        assert reply.calls == ONE


def test_reasoning_is_left_out_or_left_in_place_on_request(server: Running) -> None:
    text = "<think>Hm</think>\n\nHi"
    for reply in asked(server, "hermes-think", text, include_reasoning=False):
        assert (reply.reasoning, reply.content) == ("", "Hi")
    visible = unescaped(text, server, "hermes-think")
    for reply in asked(server, "hermes-think", text, reasoning_format="none"):
        assert (reply.reasoning, reply.content.replace("\n", "")) == ("", visible)
    for reply in asked(server, "harmony", "<|channel|>analysis<|message|>Hm<|end|>", reasoning_format="none"):
        assert (reply.reasoning, reply.content) == ("", "Hm")
    for reply in asked(server, "open-think", "Hm", tool_choice="none"):
        assert (reply.reasoning, reply.content) == ("Hm", "")


def test_items_of_a_response_are_in_the_order_of_the_answer(server: Running) -> None:
    text = f"<think>Hm</think>So. {HERMES} Then."
    *_, whole, streamed = asked(server, "hermes-think", text)
    expected = ["reasoning", "message", "function_call", "function_call", "message"]
    assert whole.kinds == streamed.kinds == [f"{kind} completed" for kind in expected]
    text = f"<think>Hm</think>So. {HERMES[:60]}"
    limit = len(script(server, "hermes-think", text)["forced_tokens"]) - 1
    *_, whole, streamed = asked(server, "hermes-think", text, max_tokens=limit)
    assert whole.kinds == streamed.kinds
    assert whole.kinds == ["reasoning completed", "message completed", "function_call incomplete"]


@pytest.mark.parametrize("content", ["Hi", "<b>Hi", "<tool_call>Hi"])
def test_logprobs_of_a_response_are_those_of_its_message(content: str, server: Running) -> None:
    body = {"model": "hermes-think", "input": ASK, "tools": FLAT, "include": ["message.output_text.logprobs"]}
    body |= script(server, "hermes-think", f"<think>Hm</think>{content}")
    reply = server.post("/v1/responses", **body).json()
    (message,) = [item["content"][0] for item in reply["output"] if item["type"] == "message"]
    tokens = "".join(one["token"] for one in message["logprobs"])
    assert tokens.removeprefix("<tool_call>") == message["text"].removeprefix("<tool_call>")


def test_an_update_of_several_tokens_is_one_update_per_token() -> None:
    logprobs = [TokenLogprob(token, -1.0, []) for token in (5, 6, 7)]
    for count, reason in (0, "stop"), (1, ""), (3, "length"):
        update = Update(0, "abc", [5, 6, 7][:count], logprobs[:count], reason)
        parts = by_token(update)
        assert [len(part.tokens) for part in parts] == [min(count, 1)] * max(count, 1)
        assert merged(parts) == update


def test_the_command_names_the_forms(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = talker(tmp_path_factory.mktemp("models"), "json", False)
    with serving(folder, tool_parser="hermes", reasoning_parser="think") as running:
        for reply in asked(running, "json", f"<think>Hm</think>{HERMES}"):
            assert (reply.reasoning, reply.content, reply.calls) == ("Hm", "", BOTH)
        assert json.loads(reply.calls[0][1])["city"]


CITY = {"$ref": "#/$defs/City"}
PLACES = [
    {
        "properties": {"city": CITY},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"enum": [*one]}},
    }
    for one in (["Oslo", "Rome"], ["Bern"])
]
FORM = {
    "type": "object",
    "properties": {"ok": {"enum": [True, False]}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", [name for name in SHOWN if "think" not in name])
def test_required_calls_are_in_the_form_of_the_model_and_of_their_own_schema(model: str, server: Running) -> None:
    functions = [{"name": name, "parameters": schema} for name, schema in zip(NAMES, PLACES)]
    body: dict[str, Any] = {"model": model, "messages": ASK, "parallel_tool_calls": False, "seed": 1}
    body |= {"tools": [{"type": "function", "function": function} for function in functions]}
    named = {"type": "function", "function": {"name": "time"}}
    for choice, cities, reason in ("required", ["Oslo", "Rome", "Bern"], "tool_calls"), (named, ["Bern"], "stop"):
        whole, streamed = (chat(server, stream, **body, tool_choice=choice, max_tokens=900) for stream in (False, True))
        assert whole.parts == streamed.parts
        if whole.finish_reason != "length":  # its reasoning may take all tokens
            ((name, arguments),) = whole.calls
            assert json.loads(arguments)["city"] in (["Oslo", "Rome"] if name == "weather" else ["Bern"])
            assert json.loads(arguments)["city"] in cities
            assert whole.finish_reason == reason


PLACE = '{"name": "weather", "arguments": {"city": "Oslo"}}'
BESIDE = {  # for each format: a call, and an answer without a call
    "hermes": (f"<tool_call>\n{PLACE}\n</tool_call>", '{"ok": true}'),
    "mistral": (f"[TOOL_CALLS][{PLACE}]", '{"ok": true}'),
    "llama3_json": (PLACE.replace("arguments", "parameters"), '{"ok": true}'),
    "json": (f"[{PLACE}]", '{"ok": true}'),
    "harmony": (
        SPOKEN.replace(" </tool_call> ü", "").replace("commentary", "<|channel|>commentary"),
        '<|channel|>final<|message|>{"ok": true}',
    ),
    "qwen3_coder": (TAGS.replace(" </tool_call> ü", ""), '{"ok": true}'),
}


@pytest.mark.parametrize("model", BESIDE)
def test_a_response_format_beside_tools_leaves_calls_possible(model: str, server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "ok", "schema": FORM}}
    body = {"model": model, "messages": ASK, "tools": TOOLS, "response_format": form}
    call, answer = (chat(server, True, **body, **script(server, model, text)) for text in BESIDE[model])
    assert (call.calls, call.content) == ([("weather", '{"city": "Oslo"}')], "")
    assert (answer.calls, answer.content) == ([], '{"ok": true}')


CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "a required call and a regex": ({"tool_choice": "required", "regex": "a"}, "Cannot combine tool_choice and regex"),
    "a format and a grammar": (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
        "Cannot combine response_format and structured_outputs",
    ),
    "another reasoning format": ({"reasoning_format": "xml"}, "reasoning_format"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFLICTS)
def test_fields_that_contradict_each_other_are_named(name: str, server: Running) -> None:
    fields, message = CONFLICTS[name]
    reply = server.post("/v1/chat/completions", model="hermes", messages=ASK, tools=TOOLS, **fields)
    assert reply.status_code == 400
    assert message in reply.text
