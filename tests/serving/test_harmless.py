"""Requests with additional fields are answered, unless a field needs an unsupported feature."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import onward
from onward import Decoder, LanguageModel, train_tokenizer
from onward.serving.usage import spelled

from support.server import Running, serving

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The cat", "max_tokens": 4, "seed": 3},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 4, "seed": 3},
    "/v1/responses": {"input": ASK, "max_output_tokens": 4, "seed": 3},
}
COMMON: dict[str, dict[str, Any]] = {  # fields that change nothing, for each path
    "nulls": {
        **dict.fromkeys(["stop", "logit_bias", "stream", "stream_options", "temperature", "top_p", "n", "top_k"]),
        **dict.fromkeys(["frequency_penalty", "presence_penalty", "response_format", "tools", "tool_choice", "user"]),
        **dict.fromkeys(["metadata", "prediction", "audio", "suffix", "echo", "function_call", "functions", "lora"]),
        **dict.fromkeys(["max_completion_tokens", "max_new_tokens", "min_tokens", "structured_outputs", "edits"]),
    },
    "nothing in them": {"stop": [], "logit_bias": {}, "stream_options": {}, "tools": [], "metadata": {}, "edits": {}},
    "about the account": {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "priority": 1,
    },
    "tools without tools": {"parallel_tool_calls": True, "tool_choice": "none"},
    "chosen by nobody": {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
    "one answer": {"n": 1, "stream": False},
    "as vLLM has it": {"spaces_between_special_tokens": False, "skip_special_tokens": True, "length_penalty": 1.0},
    "a draft": {"prediction": {"type": "content", "content": "a draft"}},
    "text only": {"modalities": ["text"]},
    "biases by number": {"logit_bias": {"3": 0, "5": 0.0}},
    "numbers as texts": {"temperature": "1", "frequency_penalty": "0"},
    "penalties of nothing": {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "top_k": -1},
    "no padding": {"stream_options": {"include_obfuscation": False}},
}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/completions": {
        "as many best answers": {"best_of": 1},
        "no echo": {"echo": False, "logprobs": None, "suffix": ""},
        "the same limit": {"max_new_tokens": 4, "n_predict": 4},
        "text as its form": {"response_format": {"type": "text"}},
    },
    "/v1/chat/completions": {
        "no alternatives": {"logprobs": False, "top_logprobs": 0},
        "the same limit": {"max_completion_tokens": 4},
        "text as its form": {"response_format": {"type": "text"}},
        "no reasoning": {"reasoning_effort": None, "verbosity": "low"},
        "a message's other fields": {
            "messages": [
                ASK[0]
                | {"name": None, "refusal": None, "audio": None, "annotations": [], "function_call": None}
                | {"tool_calls": None, "tool_call_id": None}
            ]
        },
        "text in a part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    },
    "/v1/responses": {
        "what is included": {"include": ["reasoning.encrypted_content"]},
        "text as its form": {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        "nothing stored": {"store": False, "previous_response_id": None, "conversation": None, "background": False},
        "nothing cut": {"truncation": "disabled", "max_tool_calls": None, "reasoning": {"effort": None}},
        "text in a part": {
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
        },
    },
}
CASES = [(path, name) for path in NEEDED for name in (*COMMON, *OWN[path])]


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=4) as running:
        yield running
        assert running.idle()


def texts(reply: dict[str, Any]) -> list[Any]:
    """The answers in a reply from any path."""
    items = reply.get("choices") or reply["output"]
    return [one.get("text") or one.get("message", one)["content"] for one in items]


def plain(value: Any) -> Any:
    """The text of an answer that is given as a text or in parts."""
    return "".join(part["text"] for part in value) if isinstance(value, list) else value


@pytest.mark.parametrize(("path", "name"), CASES)
def test_fields_that_change_nothing_change_nothing(path: str, name: str, server: Running) -> None:
    own = COMMON.get(name) or OWN[path][name]
    reply = server.post(path, **NEEDED[path] | own)
    assert reply.status_code == 200, reply.text
    expected = server.post(path, **NEEDED[path])
    assert list(map(plain, texts(reply.json()))) == list(map(plain, texts(expected.json())))


def test_as_many_best_answers_as_answers_are_all_of_them(server: Running) -> None:
    body = NEEDED["/v1/completions"] | {"n": 3}
    assert texts(server.post("/v1/completions", **body, best_of=3).json()) == texts(
        server.post("/v1/completions", **body).json()
    )


GREEDY: list[dict[str, Any]] = [{"top_p": 0}, {"top_p": 0, "temperature": 2}, {"temperature": 1e-5}, {"top_k": 1}]
GREEDY += [{"temperature": 1e-30}, {"temperature": 1e-300}, {"temperature": 5e-324}, {"temperature": 0, "top_p": 0.1}]


@pytest.mark.parametrize("fields", GREEDY, ids=str)
@pytest.mark.parametrize("path", NEEDED)
def test_what_leaves_only_the_likeliest_token_is_greedy(path: str, fields: dict[str, Any], server: Running) -> None:
    body = {name: value for name, value in NEEDED[path].items() if name != "seed"}
    assert (
        texts(server.post(path, **body, **fields).json())[0]
        == texts(server.post(path, **body, temperature=0).json())[0]
    )


def test_a_seed_of_minus_one_is_random_and_other_seeds_repeat(server: Running) -> None:
    def answers(seed: int | None) -> set[str]:
        body = {"prompt": "The cat", "max_tokens": 16, "temperature": 5, "seed": seed}
        return {texts(server.post("/v1/completions", **body).json())[0] for _ in range(4)}

    assert {seed: len(answers(seed)) > 1 for seed in (None, -1, 0, 7, -2, -(2**40), 2**70)} == {
        **dict.fromkeys([None, -1], True),
        **dict.fromkeys([0, 7, -2, -(2**40), 2**70], False),
    }


def test_embeddings_have_no_encoding_unless_named(server: Running) -> None:
    forms = [server.post("/v1/embeddings", input="a", encoding_format=form) for form in (None, "float")]
    assert forms[0].json() == forms[1].json()


GETS: tuple[str, ...] = (
    "/",
    "/v1/models",
    "/v1/models/{name}",
    "/health",
    "/v1/health",
    "/ready",
    "/metrics",
    "/docs",
    "/openapi.json",
)
GETS += "/tokenizer_info", "/api/engine", "/page/page.css"


@pytest.mark.parametrize("path", GETS)
def test_head_and_a_trailing_slash_are_answered_as_get(path: str, server: Running) -> None:
    address = server.url + path.format(name=server.served[0].name)
    whole, head = httpx.get(address), httpx.head(address)
    assert (whole.status_code, head.status_code) == (200, 200)
    assert head.content == b""
    assert head.headers["Content-Type"] == whole.headers["Content-Type"]
    if path not in ("/metrics", "/api/engine", "/page/page.css", "/"):
        slash = httpx.get(f"{address}/")
        assert (slash.status_code, slash.content) == (200, whole.content)


def test_a_trailing_slash_of_a_post_is_answered(server: Running) -> None:
    for path, body in NEEDED.items():
        assert server.post(f"{path}/", **body).status_code == 200
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405


def test_models_of_every_kind_of_name_are_found(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    (model,) = client.models.list()
    assert client.models.retrieve(model.id).id == model.id
    assert httpx.get(f"{server.url}/v1/models/").json()["object"] == "list"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_a_token_of_part_of_a_character_is_its_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = train_tokenizer("byte", ["a"])
    config = onward.DecoderConfig(tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, context_length=32)
    onward.save(LanguageModel(Decoder(config).eval(), tokenizer), tmp_path / "bytes")
    sent = tokenizer.encode("é😀", special=False)
    with serving(tmp_path / "bytes") as running:
        body = {"forced_tokens": sent, "max_tokens": len(sent), "temperature": 0}
        chat = running.post("/v1/chat/completions", messages=ASK, logprobs=True, top_logprobs=3, **body).json()
        text = running.post("/v1/completions", prompt="a", logprobs=3, **body).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in content] == [[byte] for byte in "é😀".encode()]
    assert [one["token"] for one in content] == [f"bytes:\\x{byte:02x}" for byte in "é😀".encode()]
    assert content[2]["token"] == r"bytes:\xf0"
    assert text["choices"][0]["logprobs"]["tokens"] == [one["token"] for one in content]
    best = text["choices"][0]["logprobs"]["top_logprobs"]
    assert all(len(others) >= 3 for others in best), "tokens of the same text do not replace each other"
    assert spelled(tokenizer, tokenizer.encode("a", special=False)[0]) == "a"
