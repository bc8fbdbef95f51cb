"""Families and vocabularies in lm-evaluation-harness: Onward gives the same result for each question as the harness's
own transformers model."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.harness_pairs import CASES, LENGTH, TEXT, models_of

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")

WITH_TEMPLATE = [name for name in CASES if "chat_template" in CASES[name][3]]
PAIRS = {  # pitfalls of splitting texts into tokens
    "a plain continuation": ("The cat", " sat on the mat"),
    "a space at the end of the context": ("The cat ", "sat on"),
    "two spaces at the end of the context": ("The cat  ", "sat"),
    "a line break at the end of the context": ("Question: The cat\nAnswer:\n", "sat"),
    "a continuation that begins within a token": ("The c", "at sat"),
    "an empty context": ("", "The dog came"),
    "a context longer than the model": (TEXT * 3, " The cat sat"),
    "a context as long as the model": ("a" * (LENGTH - 1), " c"),
    "one character each": ("x", "y"),
    "characters that are bytes": ("é 猫", " 猫猫"),
    "the text of a control token": ("<s>The cat", " sat</s>"),
    "a question with a choice": ("Question: The cat?\nAnswer:", " A"),
}


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return models_of(request.param, root(tmp_path_factory))


def root(factory: pytest.TempPathFactory, made: list[Path] = []) -> Path:  # noqa: B006  # one folder for all cases
    made[:] = made or [factory.mktemp("models")]
    return made[0]


def instances(kind: str, arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


@pytest.mark.filterwarnings("ignore::onward.harness.model.Truncated")
def test_log_likelihoods_of_texts_are_equal(pair: tuple[Any, Any]) -> None:
    requests = instances("loglikelihood", PAIRS.values())
    ours, theirs = (model.loglikelihood(requests, disable_tqdm=True) for model in pair)
    for name, (value, greedy), (expected, flag) in zip(PAIRS, ours, theirs, strict=True):
        assert value == pytest.approx(expected, abs=1e-4), name
        assert greedy == flag, name


@pytest.mark.filterwarnings("ignore::onward.harness.model.Truncated")
def test_log_likelihoods_of_tokens_are_equal(pair: tuple[Any, Any]) -> None:
    """Contexts of many lengths, some beyond the model's context length; some continuations are the likeliest tokens."""
    ours, theirs = pair
    rng, vocabulary = random.Random(0), ours.lm.config.vocab_size
    requests = []
    for size in (1, 2, 5, LENGTH - 3, LENGTH - 1, LENGTH, LENGTH + 9):
        context = [rng.randrange(vocabulary) for _ in range(size)]
        likeliest = ours.lm.complete([context[-(LENGTH - 2) :]], 2, temperature=0, stop_token_ids=[])[0][0].tokens
        for rest in (likeliest or [1], [rng.randrange(vocabulary)], [*likeliest[:1], rng.randrange(vocabulary), 3]):
            requests.append((("", ""), context, rest))
    found = ours._loglikelihood_tokens(requests)
    expected = theirs._loglikelihood_tokens(requests, disable_tqdm=True)
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4)
        assert one[1] == other[1]
    assert {greedy for _, greedy in found} == {True, False}


def test_rolling_log_likelihoods_are_equal(pair: tuple[Any, Any]) -> None:
    # no text repeats itself, since the library confuses windows that have the same tokens but a different split into
    # context and continuation
    rng = random.Random(0)
    texts = [("a",), (TEXT,), (" ".join(rng.sample(TEXT.split() * 9, 120)),), ("".join(rng.choices(TEXT, k=LENGTH)),)]
    ours, theirs = (
        model.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True) for model in pair
    )
    for value, expected, (text,) in zip(ours, theirs, texts, strict=True):
        assert value == pytest.approx(expected, abs=1e-4 * max(1, len(text) // LENGTH))


def test_windows_of_a_text_are_those_of_the_docs(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens in windows of four: only the first window begins with the beginning-of-text token, and each token is
    predicted once."""
    ours = pair[0]
    monkeypatch.setattr(type(ours), "max_length", 4)
    monkeypatch.setattr(ours, "tok_encode", lambda text: list(range(10)))
    first = ours.prefix_token_id
    assert [*ours.windows("")] == [([first], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]


@pytest.mark.filterwarnings("ignore::onward.harness.model.Truncated")
def test_written_texts_are_equal(pair: tuple[Any, Any]) -> None:
    given = [
        ("The cat", {"until": ["."], "max_gen_toks": 8}),
        ("One day a", {"until": ["e", " "], "max_gen_toks": 8, "do_sample": False}),
        (TEXT * 2, {"max_gen_toks": 12}),
        ("é 猫", {"until": [], "max_new_tokens": 9, "temperature": 0.0}),
    ]
    ours, theirs = (model.generate_until(instances("generate_until", given), disable_tqdm=True) for model in pair)
    assert ours == theirs
    assert any(ours)


TALKS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "The cat?"}],
    [
        {"role": "user", "content": "The cat?"},
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": "A dog <|im_end|> came"},
    ],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "One day"}],
]


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_chat_templates_are_applied_equally(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    ours, theirs = models_of(name, root(tmp_path_factory))
    texts = list[str]()
    for talk in TALKS:
        texts.append(ours.apply_chat_template(talk))
        assert texts[-1] == theirs.apply_chat_template(talk)
        prefilled = [*talk, {"role": "assistant", "content": "Answer:"}]
        expected = theirs.apply_chat_template(prefilled, add_generation_prompt=False)
        assert ours.apply_chat_template(prefilled, add_generation_prompt=False) == expected
    assert [ours.tok_encode(text) for text in texts] == [theirs.tok_encode(text) for text in texts]
    assert ours.chat_template(True) == theirs.chat_template(True)


@pytest.mark.parametrize("name", CASES)
def test_a_text_gets_one_token_at_its_beginning(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    ours, theirs = models_of(name, root(tmp_path_factory))
    assert ours.prefix_token_id == theirs.prefix_token_id
    for text in "The cat", "<s>The cat", "<|endoftext|>The", "":
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(text, add_special_tokens=False)


def test_perplexity_of_a_file_is_that_of_wikitext(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A task like wikitext on a file: word and byte perplexity equal the library's, bits per byte equal Onward's."""
    pages = [TEXT * 2, "The cat ran home. " * 5]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    (tmp_path / "pages.yaml").write_text(
        f"task: pages\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'pages.jsonl'}}}}}\n"
        'test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{page}}"\n'
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n"
    )
    ours, theirs = models_of("llama, pieces, texts begin with <s>", root(tmp_path_factory))
    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    found = [
        lm_eval.simple_evaluate(
            model, tasks=[str(tmp_path / "pages.yaml")], task_manager=manager, bootstrap_iters=0, log_samples=False
        )["results"]["pages"]
        for model in (ours, theirs)
    ]
    for name in "word_perplexity", "byte_perplexity", "bits_per_byte":
        assert found[0][f"{name},none"] == pytest.approx(found[1][f"{name},none"], rel=1e-5)
    nats = sum(ours.loglikelihood_rolling(instances("loglikelihood_rolling", [(page,) for page in pages])))
    size, words = sum(len(page.encode()) for page in pages), sum(len(re.split(r"\s+", page)) for page in pages)
    assert found[0]["bits_per_byte,none"] == pytest.approx(-nats / size / math.log(2))
    assert found[0]["word_perplexity,none"] == pytest.approx(math.exp(-nats / words))


def test_our_loss_is_their_rolling_log_likelihood(pair: tuple[Any, Any]) -> None:
    """The texts fit into the context. The library also predicts the beginning-of-text token, if the tokenizer adds
    one."""
    ours, theirs = pair
    for text in "The cat sat on the mat.", "One day":
        (nats,) = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
        measured = ours.lm.evaluate(np.array([ours.prefix_token_id, *ours.tok_encode(text)]))
        assert -measured.loss * measured.tokens == pytest.approx(nats, abs=1e-4)
