"""The server checks the keywords of a JSON schema that no grammar enforces, and reports violations."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

import onward
from onward import Decoder, LanguageModel, train_tokenizer
from onward.generation.schema_check import Conformance
from onward.generation.schemas import prepared

from support.server import Running, serving

BROKEN = {"enum": [True], "not": {"const": True}}  # the grammar allows only one answer, which violates `not`
KEPT = {"enum": [True], "not": {"const": 1}, "format": "password"}
MESSAGE = "response_format is not met by the answer: # breaks #/not"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_tokenizer("byte", ["a"])
    tokenizer.templates["default"] = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    )
    config = onward.DecoderConfig(tokenizer.vocab_size, d_model=8, n_layers=1, n_heads=1, context_length=256)
    torch.manual_seed(0)
    onward.save(LanguageModel(Decoder(config).eval(), tokenizer), folder)
    with serving(folder, rows=2) as running:
        yield running
        assert running.idle()


def ask(server: Running, schema: Any, **more: Any) -> httpx.Response:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    messages = [{"role": "user", "content": "a"}]
    return server.post("/v1/chat/completions", messages=messages, response_format=form, **more)


def test_answer_that_breaks_its_schema_is_an_error(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "onward.serving"):
        for _ in range(2):
            reply = ask(server, BROKEN)
            assert reply.status_code == 400
            assert reply.json()["error"]["message"].startswith(MESSAGE)
    assert caplog.messages.count(prepared(BROKEN).note) == 1
    assert ask(server, KEPT).json()["choices"][0]["message"]["content"] == "true"


def test_arguments_of_a_call_that_break_their_schema_are_an_error(server: Running) -> None:
    for answer, status in (BROKEN, 400), (KEPT, 200):
        parameters = {"properties": {"a": answer}, "required": ["a"], "additionalProperties": False}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        messages = [{"role": "user", "content": "a"}]
        how = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        reply = server.post("/v1/chat/completions", messages=messages, **how)
        assert reply.status_code == status
        if status == 400:
            expected = "tools[0].parameters is not met by the answer: #/a breaks #/properties/a/not"
            assert reply.json()["error"]["message"].startswith(expected)
        else:
            (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"a": True}


def test_stream_of_an_answer_that_breaks_its_schema_ends_with_an_error(server: Running) -> None:
    events = [json.loads(line[6:]) for line in ask(server, BROKEN, stream=True).text.splitlines() if line[6:7] == "{"]
    assert events[-1]["error"]["message"].startswith(MESSAGE)


def test_answers_are_checked_in_another_process(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conformance, "problem", lambda self, text: 1 / 0)  # would fail if called in this process
    assert ask(server, BROKEN).json()["error"]["message"].startswith(MESSAGE)
    nested: Any = 2
    for _ in range(20):
        nested = [nested]
    lists = {"type": "array", "items": {"$ref": "#/$defs/any"}}
    alternatives = [{"const": 3}, lists, lists | {"maxItems": 1}]  # each of 20 levels doubles the work
    slow = {"enum": [nested], "not": {"$ref": "#/$defs/any"}, "$defs": {"any": {"anyOf": alternatives}}}
    assert "the check of the answer takes more than 2" in ask(server, slow).json()["error"]["message"]
