"""lm-evaluation-harness as a client of the server: its results equal those of the model in this process."""

from pathlib import Path

import pytest

import onward

from support.server import serving

completions = pytest.importorskip("lm_eval.models.openai_completions", reason="needs the extra eval, and lm-eval[api]")
pytest.importorskip("tenacity", reason="needs lm-eval[api]")
PAIRS = [("The cat", " sat on"), ("The cat sat", " on the mat"), ("One day a dog", " ran home"), ("A", " dog")]


def test_chat_completions_over_http_are_those_in_process(tiny_run: Path) -> None:
    from lm_eval.api.instance import Instance

    from onward.harness import HarnessModel

    ours = HarnessModel(onward.load(tiny_run))
    talks = [[{"role": "user", "content": text}] for text in ("The cat", "A dog")]
    options = {"until": ["."], "max_gen_toks": 4}
    asked = lambda texts: [
        Instance(request_type="generate_until", doc={}, arguments=(text, options), idx=i)
        for i, text in enumerate(texts)
    ]
    expected = ours.generate_until(asked([ours.apply_chat_template(talk) for talk in talks]), disable_tqdm=True)
    with serving(tiny_run) as server:
        model = completions.LocalChatCompletion(
            base_url=f"{server.url}/v1/chat/completions", model=tiny_run.name, num_concurrent=1
        )
        found = model.generate_until(asked([model.apply_chat_template(talk) for talk in talks]), disable_tqdm=True)
    assert found == expected


@pytest.mark.parametrize("at_a_time", [1, 4])
def test_log_likelihoods_over_http_are_those_in_process(at_a_time: int, tiny_run: Path) -> None:
    from lm_eval.api.instance import Instance

    from onward.harness import HarnessModel

    requests = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(PAIRS)]
    expected = HarnessModel(onward.load(tiny_run)).loglikelihood(requests, disable_tqdm=True)
    with serving(tiny_run) as server:
        model = completions.LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model=tiny_run.name,
            tokenizer_backend="remote",
            num_concurrent=at_a_time,
            max_length=31,
        )
        found = model.loglikelihood(requests, disable_tqdm=True)
    for (value, greedy), (other, flag) in zip(found, expected, strict=True):
        assert value == pytest.approx(other, abs=1e-4)
        assert greedy == flag


def test_chats_over_http_are_those_in_process(tiny_run: Path) -> None:
    from lm_eval.api.instance import Instance

    lm = onward.load(tiny_run)
    chats = [[{"role": "user", "content": text}] for text in ("A", "Hi", "No", "The")]
    with serving(tiny_run) as server:
        model = completions.LocalChatCompletion(
            base_url=f"{server.url}/v1/chat/completions", model=tiny_run.name, num_concurrent=4
        )
        limits = {"until": ["e"], "max_gen_toks": 6}
        asked = [(model.apply_chat_template(chat), limits) for chat in chats]
        requests = [Instance("generate_until", {}, arguments, idx=i) for i, arguments in enumerate(asked)]
        found = model.generate_until(requests, disable_tqdm=True)
    assert found == [lm.chat(chat, 6, temperature=0.0, stop=["e"]) for chat in chats]
