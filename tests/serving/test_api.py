"""The API of the server, as clients see it: its results equal those of `generate` and `complete`."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions
from openai.resources.responses import Responses

from onward import GenerationOptions, LanguageModel
from onward.serving.chat import ChatRequest
from onward.serving.completions import CompletionRequest
from onward.serving.errors import ApiError
from onward.serving.fields import HARMLESS, NEUTRAL, AnswerFields, Body, check_others
from onward.serving.fields import REFUSED as REFUSED_FIELDS
from onward.serving.responses import ResponsesRequest

from support.server import Running, serving


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=4) as running:
        yield running
        assert running.idle()


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


CASES: dict[str, dict[str, Any]] = {  # fields of a request that are also options of `generate`
    "greedy": {"temperature": 0},
    "sampled": {"seed": 3, "temperature": 0.9},
    "nucleus": {"seed": 4, "top_p": 0.7},
    "penalties": {"seed": 5, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "stopped": {"seed": 3, "stop": ["e"]},
}
# fields that openai's client lacks, and the equivalent options of `generate`
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top_k": ({"top_k": 3}, {"top_k": 3}),
    "no top_k": ({"top_k": -1}, {}),
    "min_p": ({"min_p": 0.2}, {"min_p": 0.2}),
    "typical_p": ({"typical_p": 0.8}, {"typical_p": 0.8}),
    "repeat_penalty": ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "min_tokens": ({"min_tokens": 4}, {"min_new_tokens": 4}),
    "regex": ({"regex": "[a-z ]{4}"}, {"regex": "[a-z ]{4}"}),
    "choice": ({"structured_outputs": {"choice": ["cat", "dog"]}}, {"regex": "(cat)|(dog)"}),
    "include_stop": (
        {"stop": "e", "include_stop_str_in_output": True},
        {"stop": "e", "include_stop": True},
    ),
    "gbnf": ({"grammar": 'root ::= "a" | "b"'}, {"grammar": 'root ::= "a" | "b"'}),
    "n_cmpl": ({"n_cmpl": 2}, {"n": 2}),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, {"grammar": 'start: "a" | "b"'}),
}


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_a_completion_is_what_generate_returns(name: str, client: openai.OpenAI, lm: LanguageModel) -> None:
    fields = CASES.get(name, {"seed": 1})
    extra, options = MORE.get(name, ({}, fields))
    reply = client.completions.create(model="", prompt="The cat", max_tokens=8, **fields, extra_body=extra)
    (expected,) = lm.complete("The cat", 8, **{"temperature": 1.0, **fields, **options})
    assert [choice.text for choice in reply.choices] == [one.text for one in expected]
    assert [choice.finish_reason for choice in reply.choices] == [one.finish_reason for one in expected]
    assert reply.usage.completion_tokens == sum(len(one.tokens) for one in expected)


@pytest.mark.parametrize("name", CASES)
def test_streamed_pieces_joined_are_the_whole_answer(name: str, client: openai.OpenAI) -> None:
    given = {"model": "", "prompt": ["The cat", "A dog"], "max_tokens": 8, "n": 2, "seed": 3, **CASES[name]}
    given["logprobs"] = 2
    whole = client.completions.create(**given)
    texts, logprobs, reasons = ["" for _ in range(4)], [[] for _ in range(4)], [None] * 4
    for chunk in client.completions.create(**given, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    for streamed, choice in zip(logprobs, whole.choices):
        assert streamed == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_echoed_log_probabilities_are_the_model_s(client: openai.OpenAI, lm: LanguageModel) -> None:
    text = "The cat sat"
    reply = client.completions.create(model="", prompt=text, echo=True, logprobs=0, max_tokens=0)
    tokens = torch.tensor([lm.text().encode(text)])
    expected = lm.model(tokens).log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    assert reply.choices[0].text == text
    got = reply.choices[0].logprobs
    assert got.tokens == [lm.text().piece(token) for token in tokens[0].tolist()]
    assert got.token_logprobs[0] is None
    assert got.token_logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-4)
    assert "".join(got.tokens) == text
    assert [text[i : i + len(piece)] for i, piece in zip(got.text_offset, got.tokens)] == got.tokens


def test_a_chat_is_what_chat_returns(client: openai.OpenAI, lm: LanguageModel) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    given: dict[str, Any] = {"model": "", "messages": messages, "max_tokens": 8, "seed": 2, "temperature": 1.0}
    whole = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == lm.chat(messages, 8, seed=2, temperature=1.0)
    records = whole.choices[0].logprobs.content
    assert len(records) == whole.usage.completion_tokens
    assert all(len(one.top_logprobs) == 2 for one in records)
    chunks = [*client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "an unknown model": ("completions", {"model": "gpt-5", "prompt": "a"}, 404, "no model 'gpt-5'"),
    "a suffix": ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
    "a number": ("completions", {"prompt": 5}, 400, "prompt"),
    "an empty stop": ("completions", {"prompt": "a", "stop": [""]}, 400, "stop has an empty text"),
    "no answers": ("completions", {"prompt": "a", "n": 0}, 400, "n is 0"),
    "negative tokens": ("completions", {"prompt": "a", "max_tokens": -2}, 400, "max_tokens is -2"),
    "NaN": ("completions", {"prompt": "a", "temperature": "nan"}, 400, "temperature is nan"),
    "a long request": (
        "completions",
        {"prompt": "a", "max_tokens": 999},
        400,
        "999 new ones (max_tokens), because this model's maximum context length is 32 tokens",
    ),
    "two limits": ("completions", {"prompt": "a", "max_tokens": 3, "max_new_tokens": 4}, 400, "both given and differ"),
    "two forms": ("completions", {"prompt": "a", "regex": "a", "json_schema": {}}, 400, "both given"),
    "an older form": ("completions", {"prompt": "a", "guided_regex": "a"}, 400, "use structured_outputs.regex"),
    "text without limits": ("completions", {"prompt": "a", "skip_special_tokens": False}, 400, "skip_special_tokens"),
    "a large grammar": ("completions", {"prompt": "a", "grammar": "x" * 100_001}, 400, "grammar has more than 100,000"),
    "a large schema": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_object", "schema": {"title": "x" * 100_000}},
        },
        400,
        "response_format has more than 100,000",
    ),
    "alternatives of nothing": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
        400,
        "top_logprobs without logprobs",
    ),
    "a wrong regex": ("completions", {"prompt": "a", "regex": "("}, 400, "regex cannot be used"),
    "tokens": ("completions", {"prompt": [99999]}, 400, "99999"),
    "too many answers": ("completions", {"prompt": ["a"] * 100, "n": 128}, 400, "ask for fewer"),
    "no message": ("chat/completions", {"messages": []}, 400, "there are no messages"),
    "an image": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        'messages[0].content[0].type is "image_url": it must be "text"',
    ),
    "a tool without a template": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "does not show them",
    ),
    "a template": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"},
        400,
        "chat_template is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_be_met_is_refused_by_name(name: str, server: Running) -> None:
    path, body, status, message = REFUSED[name]
    reply = server.post(f"/v1/{path}", **body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["message"].count("\n") == 0
    assert set(error) == {"message", "type", "param", "code"}
    if (first := message.split()[0]) in {field.name for field in fields(GenerationOptions)}:
        assert error["param"] == first


NAMES = {  # request fields of other servers: vLLM 0.32 and llama.cpp b11434
    CompletionRequest: "add_special_tokens allowed_token_ids bad_words cache_salt echo ec_transfer_params ignore_eos "
    "frequency_penalty include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids "
    "logprobs max_tokens min_p min_tokens mm_payload n presence_penalty priority prompt prompt_embeds prompt_logprobs "
    "repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_token_ids "
    "return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens "
    "spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options structured_outputs suffix "
    "temperature thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user "
    "vllm_xargs watermarking adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser "
    "dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent "
    "dynatemp_range generation_prompt grammar grammar_lazy grammar_triggers id_slot json_schema lora max_tokens "
    "min_keep mirostat mirostat_eta mirostat_tau n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs "
    "parse_tool_calls post_sampling_probs preserved_tokens reasoning_budget_end_tag reasoning_budget_end_tags "
    "reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens reasoning_control reasoning_format "
    "repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers speculative.n_max "
    "speculative.n_min speculative.ngram_min_hits speculative.ngram_size_m speculative.ngram_size_n speculative.p_min "
    "speculative.type t_max_predict_ms timings_per_token top_n_sigma typical_p xtc_probability xtc_threshold",
    ChatRequest: "add_generation_prompt chat_template chat_template_kwargs continue_final_message documents "
    "include_reasoning media_io_kwargs mm_processor_kwargs return_prompt_text",
    ResponsesRequest: "enable_response_messages previous_input_messages",
}
OPENAI: dict[type[AnswerFields], Any] = {
    CompletionRequest: Completions.create,
    ChatRequest: Chat.create,
    ResponsesRequest: Responses.create,
}
OF_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}  # not fields of the body


@pytest.mark.parametrize("body", NAMES, ids=lambda body: body.__name__)
def test_no_field_of_another_server_is_ignored_silently(body: type[AnswerFields]) -> None:
    names = {*NAMES[body].split(), *inspect.signature(OPENAI[body]).parameters} - OF_CLIENT
    assert names - {*body.model_fields} - REFUSED_FIELDS - {*NEUTRAL} - HARMLESS == set()


@pytest.mark.parametrize("name", sorted([*REFUSED_FIELDS, *NEUTRAL]))
def test_a_field_without_meaning_here_is_refused_unless_it_changes_nothing(name: str) -> None:
    check_others(Body(**{name: None}))
    check_others(Body(**{name: NEUTRAL.get(name, False)}))
    with pytest.raises(ApiError, match=f"{name} is not supported by this server: (leave it out|use .+)"):
        check_others(Body(**{name: "something else"}))


def test_an_answer_without_a_limit_ends_with_the_context(server: Running) -> None:
    prompt = [5] * 28  # the context has 32 tokens
    reply = server.post("/v1/completions", prompt=prompt, ignore_eos=True).json()
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (4, "length")


@pytest.mark.parametrize("name", ["max_tokens", "n_predict"])
def test_a_limit_of_minus_one_is_the_context_not_the_default(name: str, server: Running) -> None:
    reply = server.post("/v1/completions", prompt=[5, 6], ignore_eos=True, **{name: -1}).json()
    assert reply["usage"]["completion_tokens"] == 30  # the context has 32 tokens, and the default is 16


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # path, and body as programs send it
    "vllm bench, completions": (
        "/v1/completions",
        {"prompt": "The cat", "repetition_penalty": 1.0, "max_tokens": 6, "logprobs": None, "ignore_eos": True},
    ),
    "vllm bench, chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_completion_tokens": 3},
    ),
    "Open WebUI": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "user": "x", "logit_bias": {"5": -100}},
    ),
    "LangChain": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 3, "temperature": 0.5, "seed": 1},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_requests_of_known_programs_are_answered(name: str, server: Running) -> None:
    path, body = SHAPES[name]
    sent = body | {"model": server.served[0].name, "stream": True, "stream_options": {"include_usage": True}}
    lines = [line for line in server.post(path, **sent).text.split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]"
    assert events[-1]["choices"] == []
    limit = body.get("max_tokens") or body["max_completion_tokens"]
    assert 0 < events[-1]["usage"]["completion_tokens"] <= limit


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_of_every_event_counts_the_tokens_so_far(path: str, server: Running) -> None:
    sent = {"max_tokens": 6, "stream": True, "prompt": "a"}
    if "chat" in path:
        sent["messages"] = [{"role": "user", "content": sent.pop("prompt")}]
    options = {"include_usage": True, "continuous_usage_stats": True}
    lines = server.post(path, **sent, stream_options=options).text.split("\n\n")
    numbers = [json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"] for line in lines[:-2]]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 0
