"""Every option of fine-tuning, for every method: it changes what is computed, or one sentence says who reads it."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, get_args

import pytest

from onward.errors import UserError
from onward.fields import changed_fields
from onward.files import file_sha256
from onward.training.finetuning.config import READERS, REQUIRED, FinetuneConfig, MethodName
from onward.training.run.run import Run

from support.finetuning import base_model, config, write_rows

BY_ALL = {  # options that all methods read
    *("sources", "validation", "optimizer", "learning_rate", "schedule", "warmup", "decay", "min_lr_ratio"),
    *("weight_decay", "beta1", "beta2", "clip", "balance_loss", "balance_bias", "average", "device", "precision"),
    *("compile", "recompute", "experts", "validate_every", "validation_tokens", "evaluation_tokens", "keep", "spike"),
    *("track", "prompt", "out", "base", "imports", "steps", "time", "epochs", "batch_size", "accumulation", "seed"),
    *("method", "template", "length", "too_long", "packed", "full", "lora", "dora"),
}
VALUES: dict[str, Any] = {  # of each other option, one that is not its default
    "label_smoothing": 0.3,
    "z_loss": 0.5,
    "loss_chunk": 7,
    "beta": 3.0,
    "gamma": 9.0,
    "desirable": 3.0,
    "undesirable": 3.0,
    "reference": "kept",
    "center": 0.5,
    "lm_weight": 0.0,
    "teacher": "teacher",
    "mix": 0.5,
    "on_policy": 1.0,
    "temperature": 3.0,
    "completion_length": 4,
    "reward": "length(characters=3)",
    "samples": 4,
    "kl": 1.0,
    "clip_low": 0.0,
    "clip_high": 0.0,
    "iterations": 3,
    "reduction": "dr_grpo",
    "discount": 0.5,
    "gae_lambda": 0.2,
    "value_weight": 0.0,
    "lora_alpha": 32.0,
    "lora_targets": ("attn",),
    "rslora": True,
    "quantize": "int8",
    "lora_dropout": 0.5,
}
WITH: dict[str, dict[str, Any]] = {one: {"lora": 2} for one in VALUES if one.startswith("lora_") or one == "quantize"}
WITH |= {"rslora": {"lora": 2, "lora_alpha": 9.0}, "clip_low": {"iterations": 3}, "clip_high": {"iterations": 3}}
EQUAL = {"loss_chunk", "reference"}  # another way to compute the same
ROWS: dict[str, list[dict[str, Any]]] = {
    "prompt": [{"prompt": f"{i} + 3?", "answer": str(i)} for i in range(4)],
    "pair": [{"prompt": f"{i} + 3?", "chosen": f"It is {i}.", "rejected": "be brief"} for i in range(4)],
    "class": [{"text": f"{i} + 3", "label": i % 2} for i in range(4)],
    "text": [{"prompt": f"{i} + 3?", "completion": f"It is {i}."} for i in range(4)],
}


def needed(method: str) -> dict[str, Any]:
    """What a method cannot do without."""
    return {
        name: {"teacher": "other", "reward": "length(characters=5)"}[name]
        for name, by in REQUIRED.items()
        if method in by
    }


def test_every_option_is_read_by_all_methods_or_has_its_readers() -> None:
    names = {field.name for field in dataclasses.fields(FinetuneConfig)} - {*FinetuneConfig.fixed}
    assert names == BY_ALL | VALUES.keys()
    assert {option for one in READERS for option in one.options} == VALUES.keys()


@pytest.mark.parametrize("method", get_args(MethodName))
def test_an_option_that_no_one_reads_is_refused_with_its_readers(method: Any) -> None:
    for name, value in VALUES.items():
        others = needed(method) | {name: value}
        readers = [one for one in READERS if name in one.options]
        if any(method in one.methods for one in readers):
            given = {"on_policy": 0.5} if name == "completion_length" and method == "distill" else {}
            assert name in changed_fields(
                FinetuneConfig(base="base", method=method, **WITH.get(name, {}) | given | others)
            )
        if not any(method in one.methods and not one.given for one in readers):
            with pytest.raises(
                UserError, match=f"^{name} is .* this run does not read: leave it out, it is for "
            ) as info:
                FinetuneConfig(base="base", method=method, **others)
            assert all(reader in str(info.value) for one in readers for reader in (*one.given, str(one)))
        default: Any = next(field.default for field in dataclasses.fields(FinetuneConfig) if field.name == name)
        FinetuneConfig(base="base", method=method, **{name: default} | needed(method))  # which changes nothing


def trained(base: Path, folder: Path, method: str, **options: Any) -> str:
    """A checksum of the weights after three steps, and of the examples."""
    kind = {"grpo": "prompt", "rloo": "prompt", "ppo": "prompt", "classify": "class", "sft": "text", "distill": "text"}
    data = write_rows(folder.parent / f"{folder.name}.jsonl", ROWS[kind.get(method, "pair")])
    paths = {name: str(base.parent / options[name]) for name in ("teacher",) if name in options}
    settings = {"method": method, "steps": 3, "template": "", "validation": "none", "learning_rate": 3e-2}
    run = Run.start(config(base, data, folder, **settings | options | paths))
    list(run.train())
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in run.model.parameters())
    return hashlib.sha256(weights).hexdigest() + file_sha256(folder / "data/train.safetensors")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to begin from, and two teachers beside it."""
    folder = tmp_path_factory.mktemp("models")
    base_model(folder / "base", d_model=32, d_ff=64)
    base_model(folder / "teacher", d_model=16)
    base_model(folder / "other", d_model=48)
    return folder / "base"


@pytest.mark.long
@pytest.mark.parametrize("method", get_args(MethodName))
def test_an_option_that_is_read_changes_the_result(method: str, base: Path, tmp_path: Path) -> None:
    same, plain = list[str](), dict[str, str]()
    for name, value in VALUES.items():
        if name in EQUAL or not any(method in one.methods for one in READERS if name in one.options):
            continue
        before = needed(method) | WITH.get(name, {})
        if method in ("grpo", "rloo", "ppo"):
            before = {"completion_length": 8} | before
        if name == "completion_length" and method == "distill":
            before["on_policy"] = 1.0
        key = str(sorted(before.items()))
        if key not in plain:
            plain[key] = trained(base, tmp_path / f"without-{name}", method, **before)
        if trained(base, tmp_path / f"with-{name}", method, **before | {name: value}) == plain[key]:
            same.append(name)
    assert same == []
