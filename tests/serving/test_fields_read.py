"""Every field that a route declares is read: its value changes the reply, or is refused by name. A field of another
route is refused unless it is empty."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import onward
from onward import Decoder, LanguageModel, train_tokenizer
from onward.serving.chat import ChatRequest
from onward.serving.completions import CompletionRequest
from onward.serving.embeddings import EmbeddingRequest
from onward.serving.fields import HARMLESS, NEUTRAL, Body, routed
from onward.serving.inside import Look, LookAtLogit, LookAtSampling
from onward.serving.responses import LOGPROBS, ResponsesRequest
from onward.serving.shapes import declared
from onward.serving.tokens import DetokenizeRequest, TokenizeRequest
from onward.text.tokenizer import END

from support.refusals import refusal
from support.server import Running, serving

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}{{ reasoning_effort }}{{ tone }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)
ASK = [{"role": "user", "content": "The"}]
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": SCHEMA} for name in "fg"]
CALLED = {"tools": TOOLS, "tool_choice": "required", "reasoning_format": "none", "max_tokens": 200}
AGAIN = {"logit_bias": {65: 1e2}, "prompt_length": 1}  # makes the model repeat one token
FORM = {"type": "json_schema", "name": "s", "schema": SCHEMA}
# for each route: the class of its body, and a valid body
NEEDED: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "The", "max_tokens": 8, "seed": 3}),
    "/v1/chat/completions": (ChatRequest, {"messages": ASK, "max_tokens": 8, "seed": 3}),
    "/v1/responses": (ResponsesRequest, {"input": ASK, "max_tokens": 8, "seed": 3}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "The"}),
    "/tokenize": (TokenizeRequest, {"prompt": "The"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [65]}),
    "/api/distribution": (LookAtSampling, {"tokens": [65, 66, 65]}),
    "/api/lens": (Look, {"tokens": [65, 66, 65]}),
    "/api/attention": (Look, {"tokens": [65, 66, 65]}),
    "/api/attribution": (LookAtLogit, {"tokens": [65, 66, 65]}),
}
VALUES: dict[str, Any] = {  # for each field: a value that has an effect, or (value, the other fields that it needs)
    "model": "another",
    **dict.fromkeys(["temperature", "top_p", "typical_p"], 0.2),
    "min_p": 1.0,
    **dict.fromkeys(["max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "n_predict"], 3),
    **dict.fromkeys(["n", "n_cmpl", "best_of", "logprobs", "top_k", "truncate_prompt_tokens"], 2),
    **dict.fromkeys(["frequency_penalty", "presence_penalty"], (1e3, AGAIN)),
    **dict.fromkeys(["repetition_penalty", "repeat_penalty"], 1e-6),
    "no_repeat_ngram_size": (1, AGAIN),
    **dict.fromkeys(["stream", "echo", "return_token_ids", "with_pieces", "return_token_strs"], True),
    **dict.fromkeys(["add_special_tokens", "add_special", "include_reasoning"], False),
    **dict.fromkeys(["prompt", "input", "content", "instructions"], "Else"),
    **dict.fromkeys(["min_tokens", "min_new_tokens"], (8, {"stop_token_ids": [*range(3, 200)]})),
    "ignore_eos": (True, {"logit_bias": {256: 1e9}}),
    "logit_bias": {70: 1e9},
    "suppress_tokens": [*range(60, 250)],
    "forced_tokens": [65],
    "stop_token_ids": [*range(3, 259)],
    "stop": (["e"], {"regex": "hello"}),
    "include_stop_str_in_output": (True, {"stop": "e", "regex": "hello"}),
    "seed": 4,
    "position": 0,
    **dict.fromkeys(["regex", "grammar"], "wrong["),
    "json_schema": SCHEMA,
    "structured_outputs": {"choice": ["a"]},
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "edits": {"layers": [0]},
    "dimensions": 5,
    "encoding_format": "base64",
    "tokens": [66, 65],
    "target": 66,
    "prompt_length": (1, {"presence_penalty": 9.0}),
    "messages": [{"role": "user", "content": "Else"}],
    "tools": TOOLS,
    "tool_choice": ("required", {"tools": TOOLS, "max_tokens": 200}),
    "parallel_tool_calls": (False, CALLED | {"logit_bias": {256: -99}}),
    "chat_template_kwargs": {"tone": "dry"},
    "reasoning_effort": "low",
    "reasoning_format": "none",
    "reasoning": {"effort": "low"},
    "response_format": ({"type": "json_schema", "json_schema": FORM}, {"reasoning_format": "none"}),
    "text": ({"format": FORM}, {"reasoning_format": "none"}),
    "add_generation_prompt": False,
    "continue_final_message": True,
    "include": ([LOGPROBS], {"reasoning_format": "none"}),
    "top_logprobs": 1,
}
OWN: dict[tuple[str, str], Any] = {  # values for a field of one route only
    ("/v1/chat/completions", "logprobs"): True,
    ("/v1/chat/completions", "top_logprobs"): (1, {"logprobs": True}),
    ("/v1/responses", "top_logprobs"): (1, {"include": [LOGPROBS], "reasoning_format": "none"}),
    ("/api/distribution", "target"): (200, {}),
    ("/api/distribution", "forced_tokens"): ([65, 66], {"prompt_length": 2}),
    ("/tokenize", "add_generation_prompt"): (False, {"prompt": None, "messages": ASK}),
}
VARIED = ("id", "created", "created_at", "item_id", "call_id")  # keys of a reply that differ between requests
ALWAYS = ("/v1/responses", "stream_options")  # here the last event always has the usage
CASES = [(path, name) for path, (cls, _) in NEEDED.items() for name in declared(cls) or {} if (path, name) != ALWAYS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    torch.manual_seed(0)
    tokenizer = train_tokenizer("byte", ["a"])
    ends = [(END, tokenizer.eos_id)]
    tokenizer.inner.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=ends)
    tokenizer.templates["default"] = TEMPLATE
    config = onward.DecoderConfig(tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, context_length=512)
    model = Decoder(config).eval()
    for weight in model.parameters():
        weight.data *= 4  # large weights, so that a change of the activations changes the tokens
    folder = tmp_path_factory.mktemp("models") / "bytes"
    onward.save(LanguageModel(model, tokenizer), folder)
    with serving(folder) as running:
        yield running


def steady(value: Any) -> Any:
    """A reply without the keys that differ between requests."""
    if isinstance(value, dict):
        return {key: steady(part) for key, part in value.items() if key not in VARIED}
    return [steady(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_declared_field_changes_the_reply_or_is_refused(path: str, name: str, server: Running) -> None:
    given = OWN.get((path, name), VALUES[name])
    value, needs = given if isinstance(given, tuple) else (given, {})
    body = NEEDED[path][1] | {key: one for key, one in needs.items() if key in (declared(NEEDED[path][0]) or {})}
    if name.startswith("max_") or name == "n_predict":
        body.pop("max_tokens", None)
    plain, changed = (server.post(path, **one) for one in (body, body | {name: value}))
    assert plain.status_code == 200, plain.text
    if changed.status_code != 200:
        message = changed.json()["error"]["message"] if name == "model" else refusal(changed, body)["message"]
        assert name in message
        return
    if changed.headers["Content-Type"] == plain.headers["Content-Type"] == "application/json":
        assert steady(changed.json()) != steady(plain.json())
    else:
        assert changed.text.count("data:") != plain.text.count("data:")


@pytest.mark.parametrize("path", NEEDED)
def test_a_field_of_another_route_is_refused_unless_it_is_empty(path: str, server: Running) -> None:
    rng, (cls, body) = random.Random(58), NEEDED[path]
    others = sorted(routed() - {*(declared(cls) or {})} - HARMLESS - {*NEUTRAL})
    for name in rng.sample(others, 12):
        value = rng.choice([True, 2, 0.5, "x", [1], {"a": 1}])
        wrong = body | {name: value}
        assert name in refusal(server.post(path, **wrong), wrong)["message"]
        empty = server.post(path, **body, **{name: rng.choice([None, False, 0, "", [], {}])})
        assert empty.status_code == 200, empty.text
