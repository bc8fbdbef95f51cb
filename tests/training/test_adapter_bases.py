"""Runs that start from an adapter: they continue it, or train another adapter on top of it, with the first one merged
or frozen."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Run, Step, UserError, use_adapter
from onward.checkpoint.weights import read_tensors
from onward.model.adapters import adapter_names
from onward.training.finetuning.base import load_base

from support.finetuning import base_model, config, pairs, write_rows
from support.runs import assert_same_adapters, metrics

ROWS = [{"prompt": f"{i} + 3?", "completion": f"It is {i + 3}."} for i in range(12)]
OPTIONS: dict[str, Any] = {"template": "", "validation": "none", "learning_rate": 2e-2, "steps": 4}
WAYS: dict[str, dict[str, Any]] = {
    "continued": {},
    "merged": {"lora": 3},
    "frozen": {"lora": "lora(rank=3, targets=(attn,))", "first": "frozen"},
    "merged, then eva": {"lora": "lora(rank=3, init=eva, b_rate=4, tokens=(5, 40))"},
    "frozen, then pissa": {"lora": "lora(rank=3, targets=(attn,), init=pissa)", "first": "frozen"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def first(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of SFT with adapters."""
    folder = tmp_path_factory.mktemp("first")
    data = write_rows(folder / "rows.jsonl", ROWS)
    list(Run.start(config(base, data, folder / "sft", lora="lora(rank=2, targets=(mlp,))", **OPTIONS)).train())
    return folder / "sft"


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", pairs())


def logits(folder: Path) -> torch.Tensor:
    model = onward.load(folder).model.eval()
    with torch.no_grad():
        return model(torch.arange(1, 30)[None])


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_dpo_on_an_adapter_starts_from_its_logits_and_resumes(
    way: str, first: Path, preferences: Path, tmp_path: Path
) -> None:
    options = OPTIONS | WAYS[way] | {"method": "dpo", "validate_every": 2}
    run = Run.start(config(first, preferences, tmp_path / "run", **options))
    torch.testing.assert_close(logits(tmp_path / "run"), logits(first), rtol=1e-5, atol=1e-5)
    step, *_ = run.train(stop=lambda: run.step == 2)
    assert isinstance(step, Step)
    assert step.loss == pytest.approx(0.693147, abs=1e-5), "the reference is the state at the start"
    list(Run.resume(tmp_path / "run").train())
    list(Run.start(config(first, preferences, tmp_path / "whole", **options)).train())
    assert_same_adapters(tmp_path / "run", tmp_path / "whole")
    assert metrics(tmp_path / "run")[-1]["loss"] < 0.69
    assert (logits(tmp_path / "run") - logits(first)).abs().max() > 1e-3
    onward.merge(tmp_path / "run", tmp_path / "merged")
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(tmp_path / "run"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_only_the_adapters_that_are_named_are_trained(way: str, first: Path, tmp_path: Path) -> None:
    made = config(first, tmp_path / "none.jsonl", tmp_path / "run", **OPTIONS | WAYS[way])
    if way.startswith("merged"):
        made = onward.FinetuneConfig.of(base=str(first), lora=3, first="frozen")
    model, _ = load_base(made)
    assert {*adapter_names(model)} == {"start" if way == "continued" else "first", "default"}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "_lora.default." in name}
    tokens = torch.arange(1, 20)[None]
    lower = "start" if way == "continued" else "first"
    with torch.no_grad(), use_adapter(model.eval(), lower):
        torch.testing.assert_close(model(tokens), onward.load(first).model.eval()(tokens))


def test_sft_then_dpo_then_merge_equals_peft(first: Path, preferences: Path, tmp_path: Path) -> None:
    """PEFT loads the adapter of each stage on its base with the same logits, and merges it to the same weights."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    for way, changes in WAYS.items():
        folder = tmp_path / way.replace(", ", "-").replace(" ", "-")
        list(Run.start(config(first, preferences, folder, **OPTIONS | changes | {"method": "dpo"})).train())
        base = json.loads((folder / "base.json").read_text())["folder"]
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(model, folder).eval()
        tokens = torch.arange(1, 30)[None]
        with torch.no_grad():
            torch.testing.assert_close(adapted(tokens).logits, logits(folder), rtol=1e-5, atol=1e-5)
        onward.merge(folder, tmp_path / f"{way}-merged")
        theirs = adapted.merge_and_unload().state_dict()
        ours = read_tensors(tmp_path / f"{way}-merged" / "model.safetensors")
        for name, tensor in ours.items():
            torch.testing.assert_close(theirs[name].float(), tensor.float(), rtol=1e-5, atol=1e-6)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "first without lora": ({"first": "frozen"}, "first is 'frozen' without adapters on top of it: give lora"),
    "dora on a frozen one": (
        {"lora": "lora(dora=true)", "first": "frozen"},
        "dora does not support adapters on a",
    ),
    "new tokens": ({"template": "chatml"}, "adds 2 tokens to the vocabulary, which adapters do not train"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence_and_leave_nothing(case: str, first: Path, preferences: Path, tmp_path: Path) -> None:
    changes, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence):
        Run.start(config(first, preferences, tmp_path / "run", **OPTIONS | {"method": "dpo"} | changes))
    assert not (tmp_path / "run").exists()


def test_first_is_for_bases_that_are_adapters(base: Path, preferences: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot use first, because .*base is not an adapter: leave it out"):
        Run.start(config(base, preferences, tmp_path / "run", **OPTIONS | {"lora": 2, "first": "merged"}))
    assert not (tmp_path / "run").exists()
