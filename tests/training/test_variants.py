"""Variants are trained under equal conditions, none is trained twice, and differences are distinguished from noise."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from onward import Attention, RunConfig, Tokenizer, UserError
from onward.base import fields
from onward.cli import main
from onward.evaluation import paired_difference
from onward.evaluation.significance import Difference, t_quantile
from onward.parallel import launch
from onward.parallel.launch import Launch
from onward.reports import RunRecord
from onward.reports.runs.variants import Result, Valley
from onward.training.studies.groups import StudyGroup
from onward.training.studies.variants import (
    Length,
    Moment,
    Variant,
    flops_per_token,
    prepare_variants,
    tokens_per_step,
    train_variants,
)

from support.ranks import Ranks, run_ranks

SMALL = {"d_model": 16, "n_layers": 1, "n_heads": 2, "context_length": 16}
FEW: dict[str, Any] = {"tokenizer": "char", "precision": "fp32", "batch_size": 2, "learning_rate": 1e-2}
FEW |= {"validate_every": 3, "validation_tokens": 64, "evaluation_tokens": 200, "device": "cpu", "steps": 1}


def variants(story_file: Path, out: Path) -> list[Variant]:
    config = RunConfig(sources=(str(story_file),), out=str(out), model=SMALL, **FEW)
    return [Variant("narrow", config), Variant("wide", replace(config, model=SMALL | {"d_model": 32}))]


def words(story_file: Path, *more: str) -> list[str]:
    model = [word for name, value in SMALL.items() for word in (f"--model.{name.replace('_', '-')}", str(value))]
    few = [
        f"--{name.replace('_', '-')}={value}" for name, value in FEW.items() if name not in ("steps", "learning_rate")
    ]
    return [str(story_file), *model, *few, *more]


@pytest.mark.parametrize("length", [Length(tokens=640), Length(flops=1e9)])
def test_variants_have_equal_tokens_or_operations(length: Length, story_file: Path, tmp_path: Path) -> None:
    spent = []
    for one in prepare_variants(variants(story_file, tmp_path), length):
        model = one.config.decoder(Tokenizer.load(tmp_path / "data-1").vocab_size)
        tokens = one.config.steps * tokens_per_step(one.config, model)
        spent.append(tokens * (1 if length.tokens else flops_per_token(model)))
    assert spent == pytest.approx([length.tokens or length.flops] * 2, rel=0.05)
    assert len([*tmp_path.glob("data-*")]) == 1, "both train on the same tokens"


def test_runs_that_ended_are_not_repeated_and_one_that_was_stopped_goes_on(story_file: Path, tmp_path: Path) -> None:
    ready = prepare_variants(variants(story_file, tmp_path), Length(steps=6))
    seen: list[Moment] = []
    assert train_variants(ready, 2, seen.append, stop=lambda: len(seen) > 9) is None
    done = [path.parent for path in tmp_path.rglob("result.json")]
    assert done == [tmp_path / "narrow/seed-0"]
    before, count = (done[0] / "result.json").stat().st_mtime_ns, len(seen)
    outcomes = train_variants(ready, 2, seen.append)
    assert outcomes is not None
    assert (done[0] / "result.json").stat().st_mtime_ns == before
    assert seen[count].variant.name == "wide", "the run that was stopped is resumed"
    assert seen[count].run.step > 1
    assert [moment.share for moment in seen] == sorted(moment.share for moment in seen)
    assert seen[-1].share == pytest.approx(1)
    assert all(len(one.values("loss")) == 2 for one in outcomes)
    assert {RunRecord(run).figures().step for one in outcomes for run in one.runs} == {6}


def test_command_compares_and_says_whether_the_difference_is_noise(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain.toml").write_text("learning_rate = 1e-2")
    command = [*words(story_file, "--steps", "6", "--seeds", "2", "--out", str(tmp_path / "runs"))]
    command = ["compare", str(tmp_path / "plain.toml"), "--variant", "still: learning_rate=0", *command]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "plain" in said.out
    assert "worse" in said.out or "two seeds are too few to tell" in said.out
    assert "4 of 4: still, seed 1" in said.err
    assert (tmp_path / "runs/compare.svg").read_text().startswith("<svg")
    assert (tmp_path / "runs/compare.pdf").read_bytes().startswith(b"%PDF")
    table = (tmp_path / "runs/compare.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table] == ["| variant", "| ---", "| plain", "| still"]
    assert "seeds differ by & parameters & tokens & seconds" in (tmp_path / "runs/compare.tex").read_text()
    rows = [*csv.DictReader((tmp_path / "runs/compare.csv").open())]
    assert float(rows[1]["difference mean"]) == pytest.approx(float(rows[1]["mean"]) - float(rows[0]["mean"]))
    assert {row["row"] for row in csv.DictReader((tmp_path / "runs/compare-curves.csv").open())} == {"plain", "still"}
    assert main([*command, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["variants"]
    assert second["mean"] > first["mean"]
    assert second["difference"]["low"] < second["mean"] - first["mean"] < second["difference"]["high"]
    assert main(["compare", *words(story_file, "--steps", "7"), *command[1:4], "--out", str(tmp_path / "runs")]) == 2
    assert "contains plain with steps 6, not 7: choose another --out" in capsys.readouterr().err


@pytest.mark.long
def test_command_sweeps_warns_at_the_edge_and_survives_a_run_that_diverges(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", *words(story_file, "--steps", "6", "--out", str(tmp_path / "runs"))]
    assert main([*command, "--learning-rate", "1e-3,1e-2,1e15"]) == 0
    said = capsys.readouterr()
    assert "best: learning_rate=1e-2" in said.out + said.err
    assert "diverged" in said.out
    assert "edge" not in said.err
    assert main([*command, "--learning-rate", "1e-3,1e-2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == "learning_rate=1e-2"
    assert "at the edge" in found["warning"]
    assert "best: 1e-2" in (tmp_path / "runs/sweep.svg").read_text()


WRONG = {
    "compare {} --steps 3 --variant a": "1 variant given: compare at least two",
    "compare {} --variant a --variant b": "no length of training is given",
    "compare {} --steps 3 --tokens 9 --variant a --variant b": "--steps and --tokens are both given",
    "compare {} --steps 0 --variant a --variant b": "--steps is '0': write a positive number",
    "compare {} --tokens 3 --variant a --variant b:clip=2": "a: tokens is 3, less than the",
    "compare {} --steps 3 --variant a --variant b:lr=3": "lr is not an option of `onward train`: did you mean",
    "compare {} --steps 3 --variant a --variant b:model.n_heads=3": "b: d_model 128 is not divisible by n_heads 3",
    "compare {} --steps 3 --variant a --variant b:optimizer=adamw": "a and b have the same configuration",
    "compare {} --steps 3 --variant a --variant b:clip=2 --variant c:clip=2.0": "b and c have the same configuration",
    "compare {} --steps 3 --variant a --variant alibi,model.position=alibi": "needs a colon after the name",
    "compare {} --steps 3 --variant a --variant b:loss=nowhere:focal": "there is no module nowhere",
    "compare {} --steps 3 --variant a --variant a": "two variants have the name a",
    "compare {} --steps 3 --variant a --variant b:validation=none": "b: Cannot compare variants without a",
    "compare {} --steps 3 --variant a --variant b:sources=x.txt": "a and b differ in sources",
    "compare {} --steps 3 --variant a --variant b:model.context_length=10000000": "b: the text has",
    "compare {} nothing.toml --steps 3 --variant b": "there is no file nothing.toml",
    "sweep {} --steps 3": "nothing to sweep",
    "sweep {} --steps 3 --learning-rate 1e-3,x": "learning_rate is 'x': it takes a number",
    "sweep {} --steps 3 --learning-rate 1e-3,1e-3": "give at least two different values",
    "sweep {} --steps 3 --sweep schedul=cosine,wsd": "schedul cannot be swept: did you mean schedule",
    "sweep {} --time 10mb --learning-rate 1e-3,1e-2": "time is '10mb'",
}


@pytest.mark.parametrize("text", WRONG)
def test_one_bad_variant_is_one_sentence_and_nothing_is_trained(
    text: str, story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*text.format(story_file).split(), "--tokenizer", "char"]) == 2
    said = capsys.readouterr().err
    assert WRONG[text] in said
    assert not [*tmp_path.rglob("seed-*")]


@pytest.mark.parametrize("command", ["scaling run a.txt", "generate runs/a"])
def test_several_processes_are_refused(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    waits = list[float]()
    monkeypatch.setattr("onward.cli.sleep", waits.append)
    for rank, expected in (
        ("0", f"Cannot run onward {command.split()[0]} in 2 processes: "),
        ("1", ""),
    ):
        monkeypatch.setenv("RANK", rank)
        assert main(command.split()) == 2
        assert capsys.readouterr().err.startswith("onward: " * bool(expected) + expected)
    assert len(waits) == 1, "the other process waits for the message of the first"


def said(words: Sequence[str]) -> tuple[str, str]:
    """Run a command in this process, which must succeed; return its standard output and standard error."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(words)
    assert status == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


SWEEP = ["--learning-rate", "1e-3,1e-2", "--seeds", "2", "--steps", "3", "--json"]
ENDED = re.compile(r"^(\d) of 4: ", re.MULTILINE)


def assert_equal_runs(one: Path, other: Path, count: int) -> None:
    """Assert that `count` runs with the same names have the same weights, bit for bit."""
    saved = {file: other / file.relative_to(one) for file in one.glob("*/seed-*/model.safetensors")}
    assert len(saved) == count
    assert [file for file, same in saved.items() if file.read_bytes() != same.read_bytes()] == []


@pytest.mark.long
def test_processes_share_the_runs_and_one_prints_the_table(story_file: Path, tmp_path: Path, two: Ranks) -> None:
    alone, shared = (["sweep", *words(story_file, *SWEEP, "--out", str(tmp_path / name))] for name in "ab")
    expected, _ = said(alone)
    (table, messages), (nothing, others) = two.run(said, shared)
    assert nothing == "", "the first process prints"
    of_runs = lambda text: [{**row, "seconds": 0, "learning_rate": ""} for row in json.loads(text)["runs"]]
    assert of_runs(table) == of_runs(expected)
    assert sorted(ENDED.findall(messages + others)) == ["1", "2", "3", "4"], "each run is trained once"
    assert_equal_runs(tmp_path / "a", tmp_path / "b", 4)


def test_groups_claim_each_run_once() -> None:
    groups = [StudyGroup(number=number, count=2, store=HashStore()) for number in range(2)]
    groups[1] = replace(groups[0], number=1)
    asked = [(run, groups[who].claim(run, lambda: False)) for run, who in [(1, 0), (1, 1), (2, 1), (3, 1), (2, 0)]]
    assert asked == [(1, True), (1, False), (2, True), (3, True), (2, False)]
    assert not groups[0].claim(4, lambda: True), "the run has ended"
    assert not groups[0].wait_until(lambda: False, stop=lambda: True)


REFUSED = [
    (["shard=2", "shard=2"], "mesh 'shard=2' needs 2 processes for each run, but 3 were started: start a multiple of"),
    (["", "shard=3"], "mesh is '' for one run and 'shard=3' for another: choose meshes with the same number of proc"),
    (["", ""], "there are 2 runs for 3 processes, 1 for each run: start at most 2"),
]


@pytest.mark.parametrize(("meshes", "message"), REFUSED)
def test_processes_that_cannot_share_the_runs_are_refused(
    meshes: list[str], message: str, story_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(launch, "LAUNCHES", [Launch(0, 3, HashStore())])
    with pytest.raises(UserError, match=re.escape(message)):
        StudyGroup.join([RunConfig(sources=(str(story_file),), mesh=mesh) for mesh in meshes], seeds=1)


@pytest.mark.long
def test_groups_of_two_train_divided_models(story_file: Path, tmp_path: Path) -> None:
    shared = ["sweep", *words(story_file, *SWEEP, "--accumulation", "2", "--learning-rate", "1e-3,1e15"), "--out"]
    expected, _ = said([*shared, str(tmp_path / "a")])
    (table, _), *_ = run_ranks(said, [*shared, str(tmp_path / "b"), "--mesh", "shard=2"], count=4)
    for one, other in zip(json.loads(table)["runs"], json.loads(expected)["runs"], strict=True):
        assert one["values"] == pytest.approx(other["values"], rel=1e-4), "a diverged run has no values"


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_interrupted_comparison_goes_on_with_any_number_of_processes(
    count: int, story_file: Path, tmp_path: Path
) -> None:
    command = ["compare", *words(story_file, "--steps", "60", "--seeds", "3", "--variant", "a", "--variant")]
    command += ["b:learning_rate=1e-3", "--json", "--out"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    expected, _ = said([*command, str(tmp_path / "a")])
    begun = [*launch, "2", "-m", "onward", *command, str(tmp_path / "b")]
    with subprocess.Popen(begun, stderr=subprocess.PIPE, text=True) as process:
        while len([*tmp_path.glob("b/*/seed-*/metrics.jsonl")]) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate()
    assert process.returncode
    assert "Stopped and saved. To go on, give the same command again." in messages
    again = [*launch, str(count), "-m", "onward", *command, str(tmp_path / "b")]
    done = subprocess.run(again, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for one, other in zip(json.loads(done.stdout)["variants"], json.loads(expected)["variants"], strict=True):
        assert one["values"] == other["values"]
    assert_equal_runs(tmp_path / "a", tmp_path / "b", 6)


def test_interval_of_paired_differences_is_that_of_student() -> None:
    quantiles = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042}  # two-sided 95 % quantiles, from a table
    for freedom, expected in quantiles.items():
        assert t_quantile(0.95, freedom) == pytest.approx(expected, abs=6e-4)
    apart = paired_difference([1.1, 2.1, 3.2], [1.0, 2.0, 3.0])  # differences 0.1, 0.1 and 0.2
    assert apart is not None
    assert apart.mean == pytest.approx(0.4 / 3)
    assert apart.high - apart.mean == pytest.approx(4.303 * 0.057735 / 3**0.5, rel=1e-3)
    assert not apart.shown, "with three seeds, a difference that varies this much may be noise"
    assert paired_difference([1.1, 2.1, 3.11], [1.0, 2.0, 3.0]).shown  # type: ignore[union-attr]
    assert paired_difference([1.0], [2.0]) is None


@pytest.mark.parametrize(
    ("count", "interval", "said"),
    [
        (2, (-0.4, 0.0005), "-0.1000 (-0.4000 to +0.0005): two seeds are too few to tell"),
        (2, (-0.4, 0.4), "two seeds are too few to tell"),
        (3, (-0.4, 0.4), "three seeds are too few to tell"),
        (12, (-0.4, 0.4), "12 seeds are too few to tell"),
        (2, (-0.2, -0.0005), "better"),
    ],
)
def test_an_interval_with_0_in_it_says_that_the_seeds_cannot_tell(
    count: int, interval: tuple[float, float], said: str
) -> None:
    first = Result("base", [1.1] * count, 1, 1, 1, 1.0)
    other = Result("other", [1.0] * count, 1, 1, 1, 1.0, Difference(-0.1, *interval))
    assert other.verdict(first).endswith(said)


OWN_PART = """
from dataclasses import dataclass

from onward.config.decoder import SelfAttention
from onward.training import CrossEntropy


@dataclass(frozen=True)
class Own(SelfAttention, kind="own_attention"):
    \"\"\"Self-attention by another name.\"\"\"

    scale: float | None = 0.5  # of the scores


def halved(model, batch):
    loss, reported = CrossEntropy()(model, batch)
    return loss / 2, reported
"""


@pytest.fixture
def own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `own_attention` in the working directory, with a subclass of self-attention."""
    monkeypatch.setattr(Attention, "kinds", dict(Attention.kinds))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_attention", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("own_attention.py").write_text(OWN_PART)
    yield
    sys.modules.pop("own_attention", None)


@pytest.mark.usefixtures("own_part")
def test_a_subclass_of_the_presets_part_inherits_its_fields() -> None:
    fields.import_parts("own_attention")
    config = RunConfig(preset="mini", model={"attention": "own_attention(window=8)"})
    made = config.decoder(50).attention
    assert made.kind == "own_attention"
    assert (made.qk_norm, made.window, made.scale) == ("head", 8, 0.5)  # of the preset, given, of the subclass
    several = RunConfig(preset="mini", model={"attention": "(own_attention, self(window=4))"}).decoder(50)
    assert [one.qk_norm for one in several.attention] == ["head", "head"]


@pytest.mark.usefixtures("own_part")
def test_variants_tell_every_field_in_which_they_differ(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", *words(story_file, "--steps", "2", "--seeds", "1", "--out", "runs"), "--import"]
    command += ["own_attention", "--variant", "base", "--variant", "own: model.attention=own_attention"]
    command += ["--variant", "wide: model.d_model=32 clip=2", "--variant", "half: loss=own_attention:halved", "--json"]
    assert main(command) == 0
    said = capsys.readouterr()
    base, own, wide, half = json.loads(said.out)["variants"]
    assert half["differs"] == ["loss  -> own_attention:halved"]
    assert half["mean"] != base["mean"]
    assert base["differs"] == []
    assert {text.split()[0] for text in own["differs"]} == {"attention", "attention.scale"}
    assert wide["differs"] == [
        "learning_rate 0.03125 -> 0.015625",
        "clip 1 -> 2",
        "d_model 16 -> 32",
        "d_head 8 -> 16",
        "d_ff 64 -> 96",
    ]
    assert f"wide: {wide['parameters']:,} parameters; versus base: {'; '.join(wide['differs'])}" in said.err
    assert f"base: {base['parameters']:,} parameters\n" in said.err


def test_a_sweep_tells_what_follows_from_the_swept_value(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = words(story_file, "--steps", "2", "--out", str(tmp_path / "runs"))
    assert main(["sweep", *shared, "--model.d-model", "16,32"]) == 0
    assert "; versus model.d_model=16: learning_rate 0.03125 -> 0.015625; d_model 16 -> 32;" in capsys.readouterr().err


def test_train_without_a_preset_tells_what_follows_from_the_changes(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", *words(story_file, "--steps", "1", "--out", str(tmp_path / "run"))]
    assert main([*command, "--model.mlp", "plain"]) == 0
    assert "in addition to your options, the preset is changed in: " in (said := capsys.readouterr().err)
    assert "d_ff 352 -> " in said
    assert "mlp.act silu -> gelu" in said


@pytest.mark.parametrize(("losses", "warning"), [((3, 2, 1), "larger"), ((1, 2, 3), "smaller"), ((2, 1, 3), "")])
def test_valley_warns_where_its_best_value_is_the_last(losses: tuple[float, ...], warning: str) -> None:
    values = {value: Result(value, [loss], 1, 1, 1, 1.0) for value, loss in zip(("1e-4", "1e-3", "1e-2"), losses)}
    valley = Valley("learning_rate", {"": values})
    assert warning in valley.edge()
    assert bool(warning) == bool(valley.edge())
