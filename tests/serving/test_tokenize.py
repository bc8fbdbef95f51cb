"""Tokens, embeddings and metrics of the server."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from onward import LanguageModel
from onward.text import chat_of

from support.server import Running, serving


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=2) as running:
        yield running


def test_texts_become_tokens_and_back(server: Running, lm: LanguageModel) -> None:
    text = "The cat ж"  # no token has all bytes of the last character
    tokens = lm.text().encode(text)
    vllm = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert vllm == {
        "count": len(tokens),
        "max_model_len": 32,
        "tokens": tokens,
        "token_strs": [*map(lm.text().piece, tokens[:-2]), r"bytes:\xd0", r"bytes:\xb6"],
    }
    text = "The cat"
    plain = lm.text().encode(text, special=False)
    llama_cpp = server.post("/tokenize", content=text, with_pieces=True).json()["tokens"]
    assert [one["id"] for one in llama_cpp] == plain
    assert "".join(one["piece"] for one in llama_cpp) == text
    assert server.post("/detokenize", tokens=plain).json() == {"prompt": text, "content": text}


def test_a_conversation_becomes_the_tokens_of_the_chat(server: Running, lm: LanguageModel) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert server.post("/tokenize", messages=messages).json()["tokens"] == chat_of(lm.text()).encode(messages)


def test_tokenizer_info_names_the_control_tokens(server: Running, lm: LanguageModel) -> None:
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    assert info.items() >= lm.text().names.items()


MESSAGES = [{"role": "user", "content": "a"}]
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing": ("/tokenize", {}, "give one of prompt"),
    "both": (
        "/tokenize",
        {"prompt": "a", "messages": MESSAGES},
        "give one of",
    ),
    "an unknown token": ("/detokenize", {"tokens": [1, 99999]}, "Token 99999 does not exist"),
    "no text": ("/v1/embeddings", {"input": []}, "input has 0 texts"),
    "a long text": ("/v1/embeddings", {"input": ["a", "b " * 99]}, "tokens of input[1]"),
    "other dimensions": ("/v1/embeddings", {"input": "a", "dimensions": 3}, "3 dimensions, because this model has 32"),
    "a token beyond": ("/v1/embeddings", {"input": [99999]}, "outside the vocabulary"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_texts_are_named(name: str, server: Running) -> None:
    path, body, message = WRONG[name]
    reply = server.post(path, **body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_an_embedding_is_the_mean_of_the_last_hidden_states(server: Running, lm: LanguageModel) -> None:
    texts = ["The cat", "A dog sat"]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    reply = client.embeddings.create(model="", input=texts)  # sent as base64, which the client decodes
    for text, one in zip(texts, reply.data):
        with torch.no_grad():
            expected = lm.model.hidden(torch.tensor([lm.text().encode(text)]))[0].mean(0)
        assert one.embedding == pytest.approx(expected.tolist(), abs=1e-5)
    raw = server.post("/v1/embeddings", input=texts[0], encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(raw), "<f4").tolist() == pytest.approx(reply.data[0].embedding)
    assert reply.usage.prompt_tokens == sum(len(lm.text().encode(text)) for text in texts)


def test_metrics_count_what_was_answered(server: Running) -> None:
    def values() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics").text
        return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}

    before = values()
    prompt = list(range(5, 25))
    for _ in range(2):
        server.post("/v1/completions", prompt=prompt, max_tokens=6, ignore_eos=True)
    server.idle()
    after = values()
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change["vllm:prompt_tokens_total"] == 40
    assert change["vllm:generation_tokens_total"] == 12
    assert change["vllm:prefix_cache_hits_total"] == 16, "the second prompt shares a block"
    assert change["vllm:e2e_request_latency_seconds_count"] == 2
    assert change["vllm:time_to_first_token_seconds_count"] == 2
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
