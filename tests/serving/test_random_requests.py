"""Random requests: the events of a stream, joined, equal the whole reply in every field."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server import Running, serving

HTTP = httpx.Client(timeout=60)
TEXTS = "Once upon a time", "Tim had a red ball. Tim had", 'She said, "', "ünï 😀 ü", "日本語", ""
STOPS = ".", " the", "e w", "time there", "😀", "本", " "
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 9}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"regex": "(😀|é|ü|日本){2,6}"},
    {"regex": "[a-z ]{5,40}\\."},
    {"grammar": 'start: ("a" | "bc")+ "."'},
    {"json_schema": SCHEMA},
    {"structured_outputs": {"choice": ["yes", "ünï😀", "no.*"]}},
]


@pytest.fixture(scope="module")
def server(shared: Path) -> Iterator[Running]:
    with serving(shared / "stories260K", rows=2) as running:
        yield running
        assert running.idle()


def request_of(choose: random.Random, vocab_size: int) -> dict[str, Any]:
    """The fields that completions and chats have in common."""
    tokens = lambda count: [choose.randrange(3, vocab_size) for _ in range(count)]
    options: dict[str, Any] = {
        "top_p": choose.choice([0, 0.3, 0.9]),
        "frequency_penalty": choose.choice([-1, 0.7]),
        "stop": choose.sample(STOPS, choose.randint(1, 2)),
        "include_stop_str_in_output": True,
        "stop_token_ids": tokens(3),
        "n": choose.randint(2, 3),
        "return_token_ids": True,
        "forced_tokens": tokens(12),
        "ignore_eos": True,
    }
    body = {name: value for name, value in options.items() if choose.random() < 0.3}
    if "forced_tokens" not in body and choose.random() < 0.3:
        body |= choose.choice(FORMS)
    fixed = {"temperature": choose.choice([0, 0.7, 1, 3]), "seed": choose.randrange(1000)}
    return {"max_tokens": choose.choice([1, 2, 7, 40]), **fixed, **body}


def whole(server: Running, path: str, body: dict[str, Any]) -> tuple[list[Any], Any]:
    """The choices and the usage of a reply that is not streamed."""
    reply = HTTP.post(server.url + path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"], reply.json()["usage"]


def streamed(server: Running, path: str, body: dict[str, Any]) -> tuple[list[Any], Any]:
    """The choices and the usage of a streamed reply, joined."""
    choices: dict[int, Any] = {}
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    lines = HTTP.post(server.url + path, json=asked).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for event in events:
        for choice in event["choices"]:
            if "delta" in choice:
                choice["message"] = {"content": "", "refusal": None} | choice.pop("delta")
            known = choices.setdefault(choice["index"], choice)
            if known is not choice:
                assert known["finish_reason"] is None
                join(known, {name: value for name, value in choice.items() if name != "index"})
    return [choices[index] for index in sorted(choices)], events[-1]["usage"]


def join(known: dict[str, Any], more: dict[str, Any]) -> None:
    """Add a later piece of a choice, or of an object in it, to the earlier ones."""
    for name, value in more.items():
        if isinstance(known.get(name), dict) and value is not None:
            join(known[name], value)
        elif value is not None:
            known[name] = known[name] + value if known.get(name) is not None else value


def assert_equal(found: Any, expected: Any) -> None:
    """Compare replies, with some tolerance for rounding in log-probabilities."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_equal(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected):
            assert_equal(*pair)
    else:
        assert found == (pytest.approx(expected, abs=1e-2) if isinstance(expected, float) else expected)


def assert_stream_is_the_reply(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    """Compare both replies; return the choices."""
    (choices, usage), (pieces, counted) = whole(server, path, body), streamed(server, path, body)
    assert_equal(pieces, choices)
    for one in usage, counted:
        assert one.pop("prompt_tokens_details")["cached_tokens"] <= one["prompt_tokens"]
    assert counted == usage
    if "return_token_ids" in body:
        assert sum(len(choice["token_ids"]) for choice in choices) == usage["completion_tokens"]
    return choices


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.long)])
def test_a_streamed_completion_is_the_whole_one(count: int, server: Running) -> None:
    choose, lm = random.Random(1), server.served[0].lm
    for _ in range(count):
        body = request_of(choose, lm.config.vocab_size)
        texts = choose.sample(TEXTS, 2)
        prompts: list[Any] = [texts[0], texts, lm.text().encode(texts[0]) or [1], [[1, 5], [1, 6, 7]]]
        body |= {"prompt": choose.choice(prompts)}
        body |= {"logprobs": choose.choice([0, 2])} if choose.random() < 0.6 else {}
        body |= {"echo": True} if choose.random() < 0.4 else {}
        assert_stream_is_the_reply(server, "/v1/completions", body)


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:.*chat template")
def test_a_streamed_chat_is_the_whole_one(count: int, server: Running) -> None:
    choose, lm = random.Random(2), server.served[0].lm
    for _ in range(count):
        body = request_of(choose, lm.config.vocab_size)
        body |= {"messages": [{"role": "user", "content": choose.choice(TEXTS)}]}
        body |= {"logprobs": True, "top_logprobs": choose.choice([0, 2])} if choose.random() < 0.6 else {}
        assert_stream_is_the_reply(server, "/v1/chat/completions", body)


@pytest.mark.filterwarnings("ignore:.*chat template")
def test_an_answer_without_tokens_has_the_same_fields_in_a_stream(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": ""}], "logprobs": True}
    asked = {"forced_tokens": [5], "stop_token_ids": [5], "return_token_ids": True, "max_tokens": 4}
    for path, body in ("/v1/completions", {"prompt": "a", "logprobs": 1}), ("/v1/chat/completions", chat):
        [choice] = assert_stream_is_the_reply(server, path, asked | body)
        assert choice["token_ids"] == []


def test_a_token_s_offset_is_where_its_text_begins(server: Running) -> None:
    tokenizer = server.served[0].lm.text()
    text = "Once upon a time 日本, a 😀"
    forced = [token for token in tokenizer.encode(" was ü é.") if token > 2]
    body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": len(forced), "forced_tokens": forced}
    ((choice,), _) = whole(server, "/v1/completions", body)
    logprobs, found = choice["logprobs"], choice["text"]
    assert found.startswith(text)
    offsets = [*logprobs["text_offset"], len(found)]
    assert offsets == sorted(offsets)
    for token, start, end in zip(logprobs["tokens"], offsets, offsets[1:]):
        if not token.startswith("bytes:") and token != "<s>":
            assert found[start:end] in (token, token.lstrip(" ")), (token, start)
