"""Wrong arguments of public functions are refused in one sentence."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward import LanguageModel, UserError, train_tokenizer

NAMED = {
    "evaluate": (lambda lm, name: lm.evaluate(name), r"give Path\('story.txt'\)"),
    "evaluate several": (lambda lm, name: lm.evaluate(["A cat.", name]), r"give Path\('story.txt'\)"),
    "score": (lambda lm, name: lm.score(name), r"give Path\('story.txt'\).read_text\(\)"),
    "classify": (lambda lm, name: lm.classify([("A cat", name)]), r"read_text\(\)"),
    "train_tokenizer": (lambda lm, name: train_tokenizer("char", [name]), r"read_text\(\)"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_text_that_names_a_file_is_refused(
    name: str, lm: LanguageModel, story_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, advice = NAMED[name]
    monkeypatch.chdir(story_file.parent)
    with pytest.raises(UserError, match=f"'story.txt', the name of a file and not the text in it: .*{advice}"):
        call(lm, "story.txt")


def test_a_model_without_a_tokenizer_refuses_text_in_one_sentence(lm: LanguageModel, tmp_path: Path) -> None:
    onward.save(LanguageModel(lm.model, None, lm.hf), tmp_path)
    bare = onward.load(tmp_path)
    assert bare.model(torch.tensor([[1, 2]])).shape == (1, 2, lm.config.vocab_size)
    calls = [lambda: bare.generate("x"), lambda: list(bare.stream("x")), lambda: bare.score("x")]
    for call in [*calls, lambda: bare.evaluate("x")]:
        with pytest.raises(onward.UserError, match=r"no tokenizer\.json"):
            call()


BAD = {
    "a prompt and new tokens beyond the context": (
        lambda lm: lm.generate("The cat", 1000),
        "maximum context length is 32",
    ),
    "a text longer than the context": (lambda lm: lm.score("a b c d e f " * 9), "use evaluate, whose window slides"),
    "a temperature below 0": (lambda lm: lm.generate("The", temperature=-1), "temperature is -1"),
    "a device that is not there": (lambda lm: onward.load("x", device="tpu9"), "device is 'tpu9'"),
    "a folder that is not there": (lambda lm: onward.load("no/such"), r"there is no folder no/such"),
    "a text of one token": (lambda lm: lm.evaluate(np.array([3])), "fewer than two tokens"),
    "an unknown option": (lambda lm: onward.train("x", "y", step=3), "did you mean steps"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_sentence(case: str, lm: LanguageModel) -> None:
    call, message = BAD[case]
    with pytest.raises(onward.UserError, match=message) as caught:
        call(lm)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_one_sentence(lm: LanguageModel) -> None:
    small = LanguageModel(onward.Decoder(replace(lm.config, vocab_size=20)), lm.tokenizer)
    for call in lambda: small.generate("The cat"), lambda: small.score("The cat"), lambda: small.evaluate("The cat"):
        with pytest.raises(onward.UserError, match="give ids, or a tokenizer, of this model"):
            call()


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "temperature as text": (
        lambda lm: lm.generate("The", 5, temperature="hot"),
        "temperature is 'hot': it must be a number from 0",
    ),
    "a number as text": (
        lambda lm: lm.generate("The", max_new_tokens="5"),
        "max_new_tokens is '5': it takes int",
    ),
    "a value in the dataclass": (lambda lm: onward.Sampling(top_p="0.5"), "top_p is '0.5': it must be a number"),  # type: ignore[arg-type]
    "fewer than no tokens": (
        lambda lm: lm.generate("The", -1),
        "max_new_tokens is -1: it must be",
    ),
    "half a top_k": (lambda lm: lm.generate("The", 5, top_k=2.5), "top_k is 2.5: it must be a whole number"),
    "half an answer": (lambda lm: lm.generate("The", 5, n=1.5), "n is 1.5: it takes int"),
    "no answer": (lambda lm: lm.generate("The", 5, n=0), "n is 0: it must be a whole number from 1"),
    "half a seed": (lambda lm: lm.generate("The", 5, seed=1.5), "seed is 1.5: it takes int"),
    "a stop that is no text": (lambda lm: lm.generate("The", 5, stop=5), "stop is 5"),
    "an empty stop text": (lambda lm: lm.generate("The", 5, stop=""), "stop has an empty text"),
    "a function as stop": (lambda lm: lm.generate("The", 5, stop=len), "pass it as stop_when"),
    "a text as stop_when": (lambda lm: lm.generate("The", 5, stop_when="."), "stop_when is '.': it takes Callable"),
    "a stop token as text": (
        lambda lm: lm.generate("The", 5, stop_token_ids=["a"]),
        r"stop_token_ids is \['a'\]: it must",
    ),
    "a schema of truth": (lambda lm: lm.generate("The", 5, json_schema=True), "json_schema is True"),
    "two forms": (lambda lm: lm.generate("The", 5, regex="a", json_schema="{}"), "choose one"),
    "negative logprobs": (lambda lm: lm.complete("The", 5, logprobs=-1), "logprobs is -1"),
    "an unknown name": (lambda lm: lm.generate("The", 5, temprature=1), "did you mean temperature"),
    "another library's name": (lambda lm: lm.generate("The", max_tokens=5), "did you mean max_new_tokens"),
    "another library's beams": (lambda lm: lm.beam_search("The", 5, num_beams=4), "did you mean beams"),
    "a draft in a search": (lambda lm: lm.beam_search("The", 5, draft=lm), "draft is not an option of this method"),
    "a stop text in a search": (lambda lm: lm.beam_search("The", 5, stop="."), "Cannot use stop in a search"),
    "an adapter in a search": (lambda lm: lm.beam_search("The", 5, adapter="a"), "Cannot use adapter in a search"),
    "beams as text": (lambda lm: lm.beam_search("The", 5, beams="4"), "beams is '4': it takes int"),
    "options that are none": (lambda lm: lm.generate("The", options={"n": 2}), "it takes GenerationOptions"),
    "several streams": (
        lambda lm: [*lm.stream("The", options=onward.GenerationOptions(n=2))],
        "Cannot stream 2 answers",
    ),
    "a negative lookup": (lambda lm: lm.generate("The", 5, lookup=-1), "lookup is -1"),
    "a draft that is no model": (lambda lm: lm.generate("The", draft="small"), "it takes LanguageModel | None"),
    "a number as prompt": (lambda lm: lm.generate(5), r"prompt is 5: it takes str \| Sequence"),
    "no prompt": (lambda lm: lm.generate(None), "prompt is None"),
    "bytes as prompt": (lambda lm: lm.generate(b"The"), "prompt is b'The'"),
    "bytes among prompts": (lambda lm: lm.complete(["The", b"A"]), r"prompt is \['The', b'A'\]: it takes"),
    "a number as stream": (lambda lm: [*lm.stream(5)], r"prompt is 5: it takes str \| Sequence\[int\]"),
    "a number as messages": (lambda lm: lm.chat(5), r"messages is 5: it takes str \| Sequence"),
    "a number to score": (lambda lm: lm.score(3), "text is 3: it takes str"),
    "a number to evaluate": (lambda lm: lm.evaluate(3), "text is 3: it takes str"),
    "a number among documents": (lambda lm: lm.evaluate(["a", 3]), r"text is \['a', 3\]: it takes str"),
    "fractions as tokens": (lambda lm: lm.evaluate(np.zeros(9)), "tokens are float64"),
    "half a stride": (lambda lm: lm.evaluate("The cat", 1.5), "stride is 1.5"),
    "no folder": (lambda lm: onward.load(None), "model is None: it takes str"),  # type: ignore[arg-type]
    "a dtype as text": (lambda lm: onward.load("x", "bf16"), "dtype is 'bf16'"),  # type: ignore[arg-type]
    "nothing to save": (lambda lm: onward.save(None, "x"), "lm is None: it takes LanguageModel"),  # type: ignore[arg-type]
    "tokens without a batch": (lambda lm: lm.model(torch.tensor([1, 2, 3])), r"tokens are int64 \(3,\): give ids"),
    "a list of tokens": (lambda lm: lm.model([[1, 2]]), "tokens are list: give a tensor of ids"),
    "vectors without a width": (lambda lm: lm.model(torch.zeros(1, 2)), r"tokens are float32 \(1, 2\)"),
    "no tokens": (lambda lm: lm.model(torch.zeros(1, 0, dtype=torch.long)), "at least one token"),
    "no rows": (lambda lm: lm.model(torch.zeros(0, 3, dtype=torch.long)), r"int64 \(0, 3\): give at least one row"),
    "no windows": (
        lambda lm: onward.Windows([onward.Tokens.of(np.arange(9))], 4, 0).read([]),
        "batch without windows",
    ),
    "positions without rows": (
        lambda lm: lm.model(torch.tensor([[1, 2]]), torch.tensor([0, 1])),
        r"positions are int64 \(2,\)",
    ),
    "positions that are no integers": (
        lambda lm: lm.model(torch.tensor([[1, 2]]), torch.tensor([[0.0, 1.0]])),
        r"positions are float32 \(1, 2\)",
    ),
    "a string in place of a cache": (
        lambda lm: lm.model(torch.tensor([[1]]), torch.tensor([[0]]), "x"),
        "cache is str: give a KVCache",
    ),
    "a manager of rows for a paged cache": (
        lambda lm: onward.CacheManager(onward.PagedKVCache(lm.config, 1, 16, blocks=4)),
        "BlockManager",
    ),
    "a run without a folder": (lambda lm: onward.train("x.txt", None), "out is None"),
    "a run whose folder is not given": (lambda lm: onward.train("x.txt", steps=1), "train: out is missing"),  # type: ignore[call-arg]
    "fine-tuning whose folder is not given": (lambda lm: onward.finetune("x", "y", lora=1), "finetune: out is missing"),  # type: ignore[call-arg]
    "an unknown option of a run": (lambda lm: onward.train("x.txt", "r", stepz=1), "stepz .* did you mean steps"),  # type: ignore[call-arg]
    "a text as sources": (lambda lm: onward.train("A cat.\nA dog.", "runs/x"), "on the text 'A cat.*paths"),
    "a number as sources": (lambda lm: onward.train(3, "runs/x"), "sources is 3"),  # type: ignore[arg-type]
    "a number as on_event": (lambda lm: onward.train("x.txt", "runs/x", 5), "on_event is 5"),  # type: ignore[arg-type]
    "no config": (lambda lm: onward.Decoder(None), "config is None: it takes DecoderConfig"),  # type: ignore[arg-type]
    "a table as config": (lambda lm: onward.Decoder({"d_model": 8}), "config is .*it takes DecoderConfig"),  # type: ignore[arg-type]
    "rows as text": (lambda lm: lm.engine(rows="2"), "rows is '2': it must be a whole number"),
    "a piece of no tokens": (
        lambda lm: lm.generate("a", prefill_budget=0),
        "prefill_budget is 0: it must be a whole number from 1",
    ),
    "an argument that is none": (lambda lm: lm.engine(foo=1), "foo is not an argument: choose from cache, draft"),
    "bytes as text": (lambda lm: onward.save(lm, "x", shard_bytes="x"), "shard_bytes is 'x': it must be a number"),  # type: ignore[arg-type]
    "a zero byte in a path": (lambda lm: onward.save(lm, "a\0b"), "path is 'a.*': a path cannot contain a zero byte"),
    "a zero byte in a source": (lambda lm: onward.train("a\0b", "runs/x"), "sources is 'a.*': a path cannot"),
    "a part as text": (lambda lm: replace(lm.config, attention="self"), "attention is 'self': it takes Attention"),
    "no part": (lambda lm: replace(lm.config, attention=None), "attention is None: it takes Attention"),
    "a misspelled size": (lambda lm: replace(lm.config, d_modell=8), "DecoderConfig: d_modell .*did you mean d_model"),
    "rows of a cache as text": (lambda lm: onward.KVCache(lm.config, "1", 8), "rows is '1': it must be a whole number"),  # type: ignore[arg-type]
    "a cache without rows": (lambda lm: onward.KVCache(lm.config, 0, 8), "rows is 0: it must be a whole number from 1"),
    "no logits": (lambda lm: onward.next_token_distribution(lm, "a"), "logits is .*it takes Tensor"),  # type: ignore[arg-type]
    "logits of one row": (
        lambda lm: onward.next_token_distribution(torch.zeros(9), onward.Sampling()),
        r"logits are float32 \(9,\): give floating-point numbers \(B, V\)",
    ),
    "samplings of other rows": (
        lambda lm: onward.next_token_distribution(torch.zeros(2, 9), [onward.Sampling()]),
        "samplings has 1 entries for 2 rows of logits",
    ),
    "a biased token beyond the logits": (
        lambda lm: onward.next_token_distribution(torch.zeros(1, 9), onward.Sampling(logit_bias={9: 1})),
        "logit_bias has token id 9",
    ),
    "a mask of numbers": (lambda lm: onward.Engine(lm.model, allowed=torch.ones(3)), r"allowed is float32 \(3,\)"),
    "tokens in place of batches": (lambda lm: onward.mean_loss(lm.model, torch.ones(1, 2)), "batches is"),  # type: ignore[arg-type]
    "a number in place of a batch": (lambda lm: onward.mean_loss(lm.model, iter([5])), "batch is 5: it takes Batch"),  # type: ignore[arg-type]
    "no tokenizer": (lambda lm: onward.Tokenizer.load(None), "path is None: it takes str"),  # type: ignore[arg-type]
    "a number as tokenizer": (lambda lm: onward.train_tokenizer(5, ["a"]), "spec is 5: it takes str"),  # type: ignore[arg-type]
    "a number as text of a tokenizer": (lambda lm: onward.train_tokenizer("char", iter([5])), "text is 5"),  # type: ignore[arg-type]
    "a text to decode": (lambda lm: lm.tokenizer.decode("abc"), "ids is 'abc'"),
    "a negative token": (lambda lm: lm.tokenizer.decode([-1]), r"ids is \[-1\]"),
    "positions of fewer tokens": (
        lambda lm: lm.model(torch.tensor([[1, 2]]), torch.tensor([[0]])),
        r"positions are int64 \(1, 1\): give integers \(B, 2\)",
    ),
    "positions as text": (lambda lm: lm.model(torch.tensor([[1, 2]]), "0 1"), "positions are str"),
    "hidden states of another width": (
        lambda lm: lm.model.logits(torch.zeros(1, 2, 5)),
        r"hidden is float32 \(1, 2, 5\)",
    ),
    "hidden states in another dtype": (
        lambda lm: lm.model.logits(torch.zeros(1, 2, 32, dtype=torch.float64)),
        r"hidden is float64 .* in torch.float32",
    ),
    "batches in place of plans": (
        lambda lm: [*onward.Trainer(lm.model, [], lambda step: 0.0).train([onward.Batch(*torch.ones(2, 1, 2))])],  # type: ignore[list-item]
        "plans is .*it takes Iterable",
    ),
    "a plan of no batches": (
        lambda lm: onward.Trainer(lm.model, [], lambda step: 0.0).train_step(onward.StepPlan(None)),  # type: ignore[arg-type]
        "plan.batches is None: it takes Sequence",
    ),
    "vectors of another width": (lambda lm: lm.model(torch.zeros(1, 2, 5)), r"vectors \(B, T, 32\)"),
    "an id beyond the vocabulary": (lambda lm: lm.model(torch.tensor([[1, 9999]])), "token id 9999 is out of range"),
}


@pytest.mark.filterwarnings("ignore::onward.text.chat.NoTemplate")
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_type_or_shape_is_one_sentence(case: str, lm: LanguageModel) -> None:
    call, message = WRONG[case]
    with pytest.raises(onward.UserError, match=message) as caught:
        call(lm)
    assert "\n" not in str(caught.value)
