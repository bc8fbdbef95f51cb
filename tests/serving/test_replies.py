"""Replies with calls and reasoning: a stream, a whole reply and a response say the same, in every form."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

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
    """The replies with a scripted answer: of chat completions and of responses, each whole and streamed."""
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
    for detail in details:  # markers spelled by several tokens may count too
        assert least <= detail["reasoning_tokens"] <= least + (25 if reasoning else 0)


def unescaped(text: str, server: Running, model: str) -> str:
    """A text of an answer as a reply gives it: without control tokens."""
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


def test_logprobs_of_a_response_are_those_of_its_message(server: Running) -> None:
    body = {"model": "hermes-think", "input": ASK, "include": ["message.output_text.logprobs"]}
    body |= script(server, "hermes-think", "<think>Hm</think>Hi")
    reply = server.post("/v1/responses", **body).json()
    (message,) = [item for item in reply["output"] if item["type"] == "message"]
    assert "".join(one["token"] for one in message["content"][0]["logprobs"]) == "Hi"


def test_the_command_names_the_forms(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = talker(tmp_path_factory.mktemp("models"), "json", False)
    with serving(folder, tool_parser="hermes", reasoning_parser="think") as running:
        for reply in asked(running, "json", f"<think>Hm</think>{HERMES}"):
            assert (reply.reasoning, reply.content, reply.calls) == ("Hm", "", BOTH)
        assert json.loads(reply.calls[0][1])["city"]
