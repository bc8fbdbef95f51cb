"""Options of the engines change no answer: several models, adapters, drafts, prompt caches on disk, chunked prefill."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import onward
from onward import LanguageModel, LoRA, UserError
from onward.serving import EngineOptions, load_served
from onward.serving.models import check_weights

from support.adapters import stirred
from support.server import serving, started

PROMPTS = "cat a", "dog b", "sun c", "car d"
LONG = "The cat sat on the mat and the dog sat on the cat, then "
FORMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 3},
    "sampled": {"seed": 3, "temperature": 0.9, "logprobs": 3},
}


@pytest.fixture(scope="module")
def wide(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny run's model with a longer context length."""
    lm = onward.load(tiny_run)
    model = onward.Decoder(replace(lm.config, context_length=128)).eval()
    model.load_state_dict(lm.model.state_dict())
    folder = tmp_path_factory.mktemp("models") / "wide"
    onward.save(LanguageModel(model, lm.tokenizer), folder)
    return folder


@pytest.fixture(scope="module")
def adapters(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The folders of two adapters for this model that change its answers."""
    folder = tmp_path_factory.mktemp("adapters")
    lm = onward.load(wide)
    stirred(lm.model, "polite", "terse", lora=LoRA(rank=2))
    for name in "polite", "terse":
        onward.save_adapter(lm, folder / name, wide, name=name)
    return [str(folder / name) for name in ("polite", "terse")]


def answers(url: str, models: list[str]) -> list[dict[str, Any]]:
    """Send LONG with the options of each of FORMS to each model at the same time; return the choice of each reply."""
    bodies = [
        {"model": model, "prompt": LONG, "max_tokens": 12, "return_token_ids": True, **form}
        for model in models
        for form in FORMS.values()
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        replies = pool.map(lambda body: httpx.post(f"{url}/v1/completions", json=body, timeout=60).json(), bodies)
        return [reply["choices"][0] for reply in replies]


@pytest.fixture(scope="module")
def expected(wide: Path) -> list[dict[str, Any]]:
    """The answers of a server with one model and the default options."""
    with serving(wide) as server:
        return answers(server.url, ["wide"])


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Assert that texts and tokens are equal, and log-probabilities to 1e-4."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert (one["text"], one["token_ids"]) == (other["text"], other["token_ids"])
        assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)


OPTIONS: dict[str, dict[str, Any]] = {
    "pieces of one token": {"prefill_budget": 1},
    "pieces of seven tokens": {"prefill_budget": 7},
    "whole prompts": {"prefill_budget": 1024},
    "one row": {"rows": 1},
    "a small cache": {"rows": 2, "cache_memory": "100KB"},
    "looked-up drafts": {"lookup": 3},
    "no drafts": {"lookup": 0},
    "a draft": {"draft": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_engine_change_no_answer(name: str, wide: Path, expected: list[dict[str, Any]]) -> None:
    options = OPTIONS[name] | ({"draft": str(wide)} if "draft" in OPTIONS[name] else {})
    with serving(wide, **options) as server:
        found = answers(server.url, ["wide"])
    assert_same(found, expected)


def test_logprobs_with_a_draft_are_those_of_score(wide: Path) -> None:
    lm = onward.load(wide)
    with serving(wide, draft=str(wide)) as server:
        choice = answers(server.url, ["wide"])[1]
    tokens = lm.text().encode(LONG, special=True) + choice["token_ids"]
    log_p = lm.model(torch.tensor([tokens]))[0, :-1].log_softmax(-1)
    new = [float(row[token]) for row, token in zip(log_p, tokens[1:])][-len(choice["token_ids"]) :]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(new, abs=1e-4)


def test_models_and_adapters_answer_side_by_side_as_they_do_alone(
    tiny_run: Path, wide: Path, adapters: list[str], expected: list[dict[str, Any]]
) -> None:
    with serving([wide, tiny_run], adapters) as server:
        listed = [one["id"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]]
        found = answers(server.url, ["wide", "polite", "terse"])
    assert listed == ["wide", "polite", "terse", tiny_run.name]
    alone = list(expected)
    for adapter in adapters:
        with serving(adapter) as server:
            alone += answers(server.url, [Path(adapter).name])
    assert_same(found, alone)
    assert len({tuple(one["token_ids"]) for one in found}) > 2


def test_base_and_adapters_have_chat_templates_of_their_own(wide: Path, adapters: list[str], tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for times, folder in enumerate(adapters, 1):
        shutil.copytree(folder, tmp_path / Path(folder).name)
        inner = onward.load(wide).text().inner
        onward.Tokenizer(inner, templates={"default": template * times}).save(tmp_path / Path(folder).name)
    with serving(wide, [str(tmp_path / Path(folder).name) for folder in adapters]) as server:
        counts = []
        for model in "wide", "polite", "terse":
            talk = [{"role": "user", "content": LONG}]
            reply = server.post("/v1/chat/completions", model=model, messages=talk, max_tokens=1).json()
            counts.append(reply["usage"]["prompt_tokens"])
    own, polite, terse = counts
    assert polite < own < terse


def test_an_adapter_of_another_base_is_refused(tiny_run: Path, tmp_path: Path, adapters: list[str]) -> None:
    config = onward.load(tiny_run).config
    other = LanguageModel(onward.Decoder(replace(config, d_model=64)), onward.load(tiny_run).tokenizer)
    onward.save(other, tmp_path / "other")
    with pytest.raises(UserError, match="polite"), serving(tmp_path / "other", adapters):
        pass


@pytest.fixture
def killed(wide: Path, tmp_path: Path) -> Path:
    """The prompt cache of a server that was killed during an answer."""
    folder = tmp_path / "prompts"
    process, url = started(str(wide), "--prompt-cache", str(folder))
    body = {"prompt": LONG, "max_tokens": 4, "temperature": 0}
    try:
        with ThreadPoolExecutor(8) as pool:
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            for number in range(8):
                pool.submit(httpx.post, f"{url}/v1/completions", json=body | {"prompt": f"{number} {LONG}"}, timeout=5)
            while sum(name.endswith(".safetensors") for name in os.listdir(folder)) < 3:
                assert process.poll() is None
            process.kill()
    finally:
        process.kill()
        process.wait()
    return folder


@pytest.mark.long
def test_prompts_on_disk_outlive_a_killed_server(wide: Path, killed: Path, expected: list[dict[str, Any]]) -> None:
    with serving(wide, prompt_cache=str(killed)) as server:
        body = {"prompt": LONG, "max_tokens": 4, "temperature": 0}
        usage = server.post("/v1/completions", **body).json()["usage"]
        found = answers(server.url, ["wide"])
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert_same(found, expected)


def test_weights_beyond_the_memory_are_refused_before_they_are_read(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.serving.models.memory_size", lambda: 1000)
    with pytest.raises(UserError, match=r"Cannot load wide, because the weights need .* [GM]B and this process may"):
        check_weights([wide], None, None)


def test_steps_are_compiled_while_there_is_no_request(wide: Path, expected: list[dict[str, Any]]) -> None:
    with serving(wide, rows=3) as server:
        worker, runner = server.service.worker, server.served[0].engine.runner
        worker.compile_when_idle()
        found = answers(server.url, ["wide"])
        while worker.spare:
            time.sleep(0.01)
        assert worker.call(lambda: {shape for (shape, *_), *_ in runner.compiled.pool.free}).result() >= {
            (1, 1),
            (2, 1),
            (3, 1),
        }
        found += answers(server.url, ["wide"])
    assert_same(found, expected * 2)


def test_prompts_that_come_at_the_same_time_are_prefilled_together(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(wide, rows=4) as server:
        runner, calls = server.served[0].engine.runner, list[int]()
        worker, wait = server.service.worker, server.service.worker.wake.wait
        # the burst ends with the fourth request instead of after a pause, which a busy machine may exceed
        more = lambda: len(worker.inbox) < 4 and not worker.stopping
        monkeypatch.setattr(worker.wake, "wait", lambda seconds=None: wait(seconds and 60 * more()))
        monkeypatch.setattr("onward.serving.worker.PAUSE", 60)
        forward = runner.forward_rows
        monkeypatch.setattr(runner, "forward_rows", lambda *given: calls.append(len(given[1])) or forward(*given))
        body = {"max_tokens": 2, "temperature": 0}
        with ThreadPoolExecutor(4) as pool:
            for text in PROMPTS:
                pool.submit(server.post, "/v1/completions", prompt=text, **body)
    assert calls == [4]


def test_a_cache_beyond_the_memory_of_the_process_is_refused(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.serving.models.memory_size", lambda: 2 * 10**7)
    monkeypatch.setattr("onward.serving.models.resident_memory", lambda: 0)
    load = lambda name, folders: onward.load(name)
    small, large = (EngineOptions(rows=rows, cache_memory="900MB") for rows in (2, 4096))
    assert load_served([str(tiny_run)], (), small, load)
    with pytest.raises(UserError, match="cache_memory is 900MB, of which this cache would take"):
        load_served([str(tiny_run)], (), large, load)
