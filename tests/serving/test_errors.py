"""Errors name the field that the client sent, its path, and the allowed values."""

import logging
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onward import UserError
from onward.serving import fields
from onward.serving.chat import of_messages
from onward.serving.names import OTHER_NAMES

from support.refusals import refusal
from support.server import Running, serving

ASK = [{"role": "user", "content": "a"}]
NEEDED: dict[str, dict[str, Any]] = {  # for each path, a valid body
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {},
}
CUT_CALL = {"function": {"name": "f", "arguments": "{"}}


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=4) as running:
        yield running
        assert running.idle()


LONG = "a " * 99
# path, body, expected param, numbers in the message
TOO_LONG: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "a prompt": ("/v1/completions", {"prompt": [5] * 40}, "prompt", ["40", "32"]),
    "the second prompt": ("/v1/completions", {"prompt": [[5], [5] * 40]}, "prompt[1]", ["40", "32"]),
    "a prompt and its answer": ("/v1/completions", {"prompt": [5] * 30, "max_tokens": 3}, "prompt", ["30", "3", "32"]),
    "in llama.cpp's words": ("/v1/completions", {"prompt": [5] * 30, "n_predict": 3}, "prompt", ["n_predict", "32"]),
    "a conversation": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages", ["32"]),
    "a conversation and its answer": (
        "/v1/chat/completions",
        {"messages": ASK, "max_completion_tokens": 90},
        "messages",
        ["90", "max_completion_tokens", "32"],
    ),
    "a response": ("/v1/responses", {"input": LONG}, "input", ["32"]),
    "a response and its limit": ("/v1/responses", {"input": "a", "max_output_tokens": 90}, "input", ["90", "32"]),
    "token ids to embed": ("/v1/embeddings", {"input": [[5], [5] * 40]}, "input[1]", ["40", "32"]),
    "a text to look into": ("/api/lens", {"tokens": [5] * 40}, "tokens", ["40", "32"]),
}


@pytest.mark.parametrize("name", TOO_LONG)
@pytest.mark.parametrize("stream", [False, True])
def test_a_context_that_is_too_short_has_a_code_and_both_numbers(name: str, stream: bool, server: Running) -> None:
    path, body, param, numbers = TOO_LONG[name]
    sent = body | ({"stream": True} if stream and not path.endswith(("embeddings", "lens")) else {})
    error = refusal(server.post(path, **sent), sent)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "this model's maximum context length is" in error["message"]
    assert all(re.search(rf"\b{number}\b", error["message"]) for number in numbers)


NAMED: dict[str, tuple[str, dict[str, Any], str, str]] = {  # path, body, expected param, beginning of the message
    "fewer than no tokens": ("/v1/completions", {"max_tokens": -2}, "max_tokens", "max_tokens is -2"),
    "by OpenAI's newer name": ("/v1/chat/completions", {"max_completion_tokens": -2}, "max_completion_tokens", "max_c"),
    "in responses": ("/v1/responses", {"max_output_tokens": -2}, "max_output_tokens", "max_output_tokens is -2"),
    "by llama.cpp's name": ("/v1/completions", {"n_predict": -2}, "n_predict", "n_predict is -2"),
    "by ours": ("/v1/completions", {"max_new_tokens": -2}, "max_new_tokens", "max_new_tokens is -2"),
    "more than the limit": (
        "/v1/completions",
        {"min_tokens": 4, "max_tokens": 2},
        "min_tokens",
        "min_tokens is 4: it must be at most max_tokens, 2",
    ),
    "more than no limit": (
        "/v1/completions",
        {"min_tokens": 99},
        "min_tokens",
        "min_tokens is 99: it must be at most max_tokens",
    ),
    "two limits": (
        "/v1/completions",
        {"max_tokens": 3, "n_predict": 4},
        "max_tokens",
        "n_predict and max_tokens are both given and differ",
    ),
    "a penalty": ("/v1/completions", {"repeat_penalty": 0}, "repeat_penalty", "repeat_penalty is 0"),
    "answers": ("/v1/completions", {"n_cmpl": 0}, "n_cmpl", "n_cmpl is 0"),
    "many answers": ("/v1/completions", {"n_cmpl": 129}, "n_cmpl", "n_cmpl is 129"),
    "many prompts": ("/v1/completions", {"prompt": ["a"] * 100}, "prompt", "prompt has 100 texts"),
    "no message": ("/v1/chat/completions", {"messages": []}, "messages", "there are no messages"),
    "no message to count": ("/tokenize", {"messages": []}, "messages", "there are no messages"),
    "no prompt": ("/v1/completions", {"prompt": []}, "prompt", "prompt is an empty list"),
    "messages as a text": (
        "/v1/chat/completions",
        {"messages": "Hi"},
        "messages",
        'messages is "Hi": it must be a list of objects',
    ),
    "no stop": ("/v1/completions", {"stop": ["a", ""]}, "stop", "stop has an empty text"),
    "a token": ("/v1/completions", {"logit_bias": {"99999": 1}}, "logit_bias", "logit_bias has token id 99999"),
    "a prompt's token": ("/v1/completions", {"prompt": [99999]}, "prompt", "token id 99999"),
    "a table of biases": (
        "/v1/completions",
        {"logit_bias": [[5, 1]]},
        "logit_bias",
        "logit_bias is [[5, 1]]: it must be an object with at most 16,384 items",
    ),
    "a tool without a name": (
        "/v1/chat/completions",
        {
            "messages": ASK,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function"},
        },
        "tool_choice",
        "tool_choice names no function",
    ),
    "a minimum of candidates": ("/v1/completions", {"min_keep": 3}, "min_keep", "min_keep is not supported"),
    "its second prompt": ("/v1/completions", {"prompt": [[1], [99999]]}, "prompt[1]", "prompt[1]: token id 99999"),
    "an expression": (
        "/v1/completions",
        {"structured_outputs": {"regex": "("}},
        "structured_outputs",
        "structured_outputs cannot be used",
    ),
    "our expression": ("/v1/completions", {"regex": "("}, "regex", "regex cannot be used"),
    "a grammar": ("/v1/completions", {"grammar": "root = ("}, "grammar", "grammar cannot be used"),
    "a schema": (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}},
        "response_format.json_schema.schema",
        "response_format.json_schema.schema ",
    ),
    "a schema in responses": (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "colour"}}}},
        "text.format.schema",
        "text.format.schema ",
    ),
    "the third message": (
        "/v1/chat/completions",
        {"messages": [*ASK, *ASK, {"role": "user", "content": 5}]},
        "messages[2].content",
        "messages[2].content is 5: it must be a text or a list of objects",
    ),
    "a message's part": (
        "/v1/chat/completions",
        {"messages": [*ASK, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
        "messages[1].content[1].type",
        'messages[1].content[1].type is "input_audio": it must be "text"',
    ),
    "arguments that are no JSON": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}, CUT_CALL]}]},
        "messages[0].tool_calls[1].function.arguments",
        'messages[0].tool_calls[1].function.arguments is "{": it must be an object',
    ),
    "a function without a name": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.name",
        "messages[0].tool_calls[0].function.name is missing",
    ),
    "an older call": (
        "/v1/chat/completions",
        {"messages": [*ASK, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages[1].function_call",
        "messages[1].function_call is not supported by this server: use content and tool_calls",
    ),
    "an item": ("/v1/responses", {"input": [*ASK, {"type": "image"}]}, "input[1]", 'input[1] has the type "image"'),
    "an item's arguments": (
        "/v1/responses",
        {"input": [*ASK, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
        "input[1].arguments",
        'input[1].arguments is "[1]": it must be an object',
    ),
    "a tool": (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "web_search"}]},
        "tools[1]",
        "tools[1] is not a function",
    ),
    "a tool's schema": (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]},
        "tools[0].function.parameters",
        'tools[0].function.parameters is "{}": it must be an object',
    ),
    "a union": (
        "/v1/completions",
        {"prompt": {"text": "a"}},
        "prompt",
        'prompt is {"text": "a"}: it must be a text, a list of texts, a list of whole numbers or a list of lists of '
        "whole numbers",
    ),
    "true for a number": ("/v1/completions", {"n": True}, "n", "n is true: it must be a whole number"),
    "true for a token": ("/v1/completions", {"prompt": [True, 5]}, "prompt", "prompt is [true, 5]: it must be"),
    "a number out of range": (
        "/v1/completions",
        {"logprobs": 101},
        "logprobs",
        "logprobs is 101: it must be a whole number from 0 to 100",
    ),
    "a head": (
        "/v1/completions",
        {"edits": {"heads": [[0, 1], [0]]}},
        "edits.heads[1]",
        "edits.heads[1] is [0]: it must",
    ),
    "too many layers": (
        "/v1/completions",
        {"edits": {"layers": [0] * 4097}},
        "edits.layers",
        "edits.layers is [0, 0,",
    ),
    "an encoding": (
        "/v1/embeddings",
        {"encoding_format": "hex"},
        "encoding_format",
        'encoding_format is "hex": it must be "float" or "base64"',
    ),
    "other best answers": (
        "/v1/completions",
        {"n": 2, "best_of": 3},
        "best_of",
        "Cannot rank answers by best_of 3",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_mistake_is_named_as_it_was_sent(name: str, server: Running) -> None:
    path, given, param, message = NAMED[name]
    body = NEEDED[path] | given
    if any(name in given for name in (*OTHER_NAMES, *OTHER_NAMES.values())):
        body = {key: value for key, value in body.items() if key in given or OTHER_NAMES.get(key) != "max_new_tokens"}
    error = refusal(server.post(path, **body), body)
    assert error["param"] == param
    assert error["message"].startswith(message), error["message"]


BROKEN: dict[str, tuple[bytes, str | None, str]] = {  # body, Content-Type, expected message
    "a form": (b"prompt=a", "application/x-www-form-urlencoded", 'Content-Type is "application/x-www-form-urlencoded"'),
    "plain text": (b'{"prompt": "a"}', "text/plain", 'Content-Type is "text/plain": send the body as application/json'),
    "no type": (b'{"prompt": "a"}', None, "Content-Type is missing: send the body as application/json"),
    "no body": (b"", "application/json", "the body is missing: send a JSON object"),
    "a list": (b"[1]", "application/json", "the body is [1]: send a JSON object"),
    "null": (b"null", "application/json", "the body is"),
    "half of it": (b'{"prompt": ', "application/json", "the body is not JSON (Expecting value at character 11)"),
    "another encoding": ('{"prompt": "é"}'.encode("latin1"), "application/json", "the body is not JSON in UTF-8"),
    "too deep": (b"[" * 100_000, "application/json", "or nests too deep"),
    "a number of many digits": (b"9" * 5000, "application/json", "has a number of too many digits"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_body_that_cannot_be_read_is_named(name: str, server: Running) -> None:
    content, kind, message = BROKEN[name]
    headers = {"Content-Type": kind} if kind else {}
    reply = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert message in refusal(reply, {})["message"]


def test_the_message_that_a_template_leaves_out_is_named_by_its_index() -> None:
    error = UserError("message 3 has no effect, because the chat template does not write it: use another role")
    for field, param in ("messages", "messages[2]"), ("input", "input"):
        found = of_messages(error, field)
        assert (found.status, found.param) == (400, param)
    assert str(of_messages(error, "messages")).startswith("messages[2] has no effect, because")


FORM: dict[str, Any] = {"type": "json_object"}
STREAMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"response_format": FORM}, "response_format"),
    "completions": ("/v1/completions", {"structured_outputs": {"json_object": True}}, "structured_outputs"),
    "responses": ("/v1/responses", {"text": {"format": FORM}}, "text.format"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_an_error_in_a_stream_uses_the_names_of_the_request(
    name: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(job: Any) -> AsyncIterator[Any]:
        raise UserError("json_schema is not met by this answer")
        yield

    monkeypatch.setattr("onward.serving.service.checked", failing)
    path, fields, field = STREAMS[name]
    reply = server.post(path, **NEEDED[path], **fields, stream=True)
    assert reply.status_code == 200
    assert f"{field} is not met by this answer" in reply.text


def test_unknown_fields_are_named_once_at_every_depth(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "hue": 1}, "tone": None}
    tool = {"type": "function", "function": {"name": "f", "hue": 1}}
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "hue": 1}], "hue": {"a": 1}}],
        "stream_options": {"hue": 1},
        "response_format": form,
        "tools": [tool],
        "tool_choice": "none",
        "edits": {"hue": 1},
        "structured_outputs": None,
        "hue": 1,
        "max_tokens": 1,
    }
    fields.unknown_fields.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert server.post("/v1/chat/completions", **body).status_code == 200
    named = re.findall(r"'(\S+)'", " ".join(record.getMessage() for record in caplog.records))
    objects = "messages[].content[]", "messages[]", "stream_options", "response_format.json_schema", "tools[].function"
    assert sorted(named) == sorted([*(f"{one}.hue" for one in (*objects, "edits")), "hue"])
