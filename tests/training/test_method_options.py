"""Methods as values: every field, except a few, changes the result; an option of other methods is refused with their
names."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from onward import FinetuneConfig, Method, Run, UserError
from onward.base import fields
from onward.base.files import file_sha256
from onward.cli import main
from onward.training import PolicyMethod, reward_of
from onward.training.environments.calculator import Calculator
from onward.training.methods.reference import Kept

from support.finetuning import base_model, config, write_rows
from support.runs import metrics

METHODS = Method.choices()
VALUES: dict[str, Any] = {  # for each field, a value that is not its default
    "label_smoothing": 0.3,
    "z_loss": 0.5,
    "loss_chunk": 7,
    "beta": 3.0,
    "tail": 0.3,
    "normalized": True,
    "variant": "down",
    "tau": 3.0,
    "gamma": 9.0,
    "desirable": 3.0,
    "undesirable": 3.0,
    "reference": Kept(),
    "center": 0.5,
    "lm_weight": 0.0,
    "teacher": "teacher",
    "mix": 0.5,
    "on_policy": 1.0,
    "temperature": 3.0,
    "completion_length": 4,
    "reward": reward_of("length(characters=3)"),
    "samples": 4,
    "kl": 1.0,
    "scale": "none",
    "clip_low": 0.0,
    "clip_high": 0.0,
    "clip_worst": 1.0,
    "highest": 1.0,
    "tau_good": 30.0,
    "tau_bad": 30.0,
    "iterations": 3,
    "mask_truncated": True,
    "environment": Calculator(),
    "replay": 4,
    "reduction": "dr_grpo",
    "discount": 0.5,
    "gae_lambda": 0.2,
    "value_weight": 0.0,
    "depth": 2,
    "falloff": 0.1,
    "units": 8,
}
NEEDED = {"teacher": "other", "reward": reward_of("length(characters=5)")}
CLIPS = "clip_low", "clip_high", "clip_worst", "highest", "tau_good", "tau_bad"
WITH: dict[str, dict[str, Any]] = {name: {"iterations": 3} for name in CLIPS}
EQUAL = {"loss_chunk", "reference"}  # another way to compute the same result
EQUAL |= {"environment", "replay"}  # the first only affects models that write expressions, the second longer runs
ROWS: dict[str, list[dict[str, Any]]] = {
    "prompt": [{"prompt": f"{i} + 3?", "answer": str(i)} for i in range(4)],
    "pair": [{"prompt": f"{i} + 3?", "chosen": f"It is {i}.", "rejected": "be brief" + "!" * i} for i in range(4)],
    "class": [{"text": f"{i} + 3", "label": i % 2} for i in range(4)],
    "text": [{"prompt": f"{i} + 3?", "completion": f"It is {i}."} for i in range(4)],
}
READERS = {name: [kind for kind, method in METHODS.items() if name in fields.hints(method)] for name in VALUES}


def needed(kind: str) -> dict[str, Any]:
    """The required options of a method."""
    return {name: value for name, value in NEEDED.items() if name in fields.hints(METHODS[kind])}


def rows_of(kind: str) -> list[dict[str, Any]]:
    if issubclass(METHODS[kind], PolicyMethod):
        return ROWS["prompt"]
    return ROWS[{"classify": "class", "sft": "text", "distill": "text", "draft": "text"}.get(kind, "pair")]


def test_every_field_of_a_method_has_a_case() -> None:
    assert {name for method in METHODS.values() for name in fields.hints(method)} == VALUES.keys()


@pytest.mark.parametrize("kind", METHODS)
def test_an_option_is_a_field_of_the_method_or_refused_with_its_readers(kind: str) -> None:
    for name, value in VALUES.items():
        options = {"base": "base", "method": kind} | needed(kind) | {name: value}
        options |= {"on_policy": 0.5} if (kind, name) == ("distill", "completion_length") else {}
        if kind in READERS[name]:
            beside = FinetuneConfig.of(**options)
            own = {key: fields.plain(option) for key, option in options.items() if key not in ("base", "method")}
            inside = {"kind": kind} | own
            assert beside == FinetuneConfig.of(base="base", method=inside)
            assert getattr(beside.method, name) == value
            assert fields.part(Method, fields.notation(beside.method), "") == beside.method
        else:
            with pytest.raises(UserError, match=f"^{name} is not an option of {kind}, but of ") as info:
                FinetuneConfig.of(**options)
            assert all(reader in str(info.value) for reader in READERS[name])


@pytest.mark.parametrize("kind", METHODS)
def test_help_of_a_method_shows_its_fields_and_its_formula(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["finetune", "--method", kind, "--help"])
    out = capsys.readouterr().out
    assert f"The loss of {kind}: {METHODS[kind].formula}\n" in out
    for name in fields.hints(METHODS[kind]):
        assert f"--{name.replace('_', '-')}" in out
    assert all(other in out for other in METHODS)


@pytest.mark.parametrize("kind", METHODS)
def test_a_method_is_documented_and_names_its_source(kind: str) -> None:
    method = METHODS[kind]
    assert method.formula
    assert len(method.__doc__ or "") > 30
    assert fields.docs(method).keys() >= fields.hints(method).keys()


def trained(base: Path, folder: Path, kind: str, **options: Any) -> str:
    """The checksums of the weights after three steps and of the examples."""
    data = write_rows(folder.parent / f"{folder.name}.jsonl", rows_of(kind))
    paths = {name: str(base.parent / options[name]) for name in ("teacher",) if name in options}
    settings = {"method": kind, "steps": 3, "template": "", "validation": "none", "learning_rate": 3e-2}
    run = Run.start(config(base, data, folder, **settings | options | paths))
    list(run.train())
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in run.model.parameters())
    return hashlib.sha256(weights).hexdigest() + file_sha256(folder / "data/train.safetensors")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and two teachers."""
    folder = tmp_path_factory.mktemp("models")
    base_model(folder / "base", d_model=32, d_ff=64)
    base_model(folder / "teacher", d_model=16)
    base_model(folder / "other", d_model=48)
    return folder / "base"


@pytest.mark.parametrize("kind", METHODS)
def test_a_run_reports_the_figures_that_its_method_names(kind: str, base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path / "run", kind, **needed(kind), **({"samples": 2} if "samples" in needed(kind) else {}))
    usual = {"step", "loss", "learning_rate", "grad_norm", "tokens", "seconds", "failure", "update_ratio", "kind"}
    assert {*METHODS[kind].reports} == metrics(tmp_path / "run")[0].keys() - usual


@pytest.mark.long
@pytest.mark.parametrize("kind", METHODS)
def test_an_option_that_is_read_changes_the_result(kind: str, base: Path, tmp_path: Path) -> None:
    same, plain = list[str](), dict[str, str]()
    for name, value in VALUES.items():
        if name in EQUAL or kind not in READERS[name]:
            continue
        before = needed(kind) | WITH.get(name, {})
        if issubclass(METHODS[kind], PolicyMethod):
            before = {"completion_length": 8} | before
        if name == "completion_length" and kind == "distill":
            before["on_policy"] = 1.0
        key = str(sorted(before.items()))
        if key not in plain:
            plain[key] = trained(base, tmp_path / f"without-{name}", kind, **before)
        if trained(base, tmp_path / f"with-{name}", kind, **before | {name: value}) == plain[key]:
            same.append(name)
    assert same == []
