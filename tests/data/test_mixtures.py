"""Mixtures of data sets: shares by constant weights or weights that change over a run, packing across sets, and a
validation loss for each set."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward import MovingWeight, Ramp, Run, RunConfig, UserError
from onward.base import fields
from onward.config.mixtures import points_of
from onward.data.curricula import Curriculum, interleaving
from onward.data.examples import Examples
from onward.data.mixtures import SET, joined, one_set, weighted
from onward.reports.runs.write import write_reports
from onward.training.inputs.record import read_config

from support.finetuning import base_model, config, write_rows
from support.runs import assert_same_adapters, metrics


def table(count: int, first: int) -> Examples:
    """Examples of one token each, with token ids from `first` on and a margin each."""
    tokens = np.arange(first, first + count, dtype=np.uint32)
    return Examples(tokens, np.ones(count, bool), np.arange(1, count + 1), 1, {"margin": tokens * 1.0})


def test_joined_tables_have_all_examples_in_order_and_their_sets() -> None:
    both = joined([table(3, 0), table(2, 10)])
    assert [both.sequence(i).tokens for i in range(5)] == [[0], [1], [2], [10], [11]]
    assert both.numbers[SET].tolist() == [0, 0, 0, 1, 1]
    assert both.numbers["margin"].tolist() == [0, 1, 2, 10, 11]
    assert one_set(both, 1).tokens.tolist() == [10, 11]


@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.data())
def test_shares_are_those_of_the_weights(counts: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 10), min_size=len(counts), max_size=len(counts)))
    mixture = joined([table(count, 100 * i) for i, count in enumerate(counts)])
    made = weighted(mixture, weights, 0)
    for i, (weight, count) in enumerate(zip(weights, counts)):
        own = made.tokens[made.numbers[SET] == i]
        assert abs(len(own) - sum(counts) * weight / sum(weights)) <= 0.5
        times = np.bincount(own.astype(int) - 100 * i, minlength=count)
        assert times.max() - times.min() <= 1, "the counts of a set's examples differ by at most 1"
    assert np.array_equal(made.tokens, weighted(mixture, weights, 0).tokens)


def test_a_run_on_a_mixture_packs_across_sets_and_validates_each(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    rows = [[{"prompt": f"{i} + {k}?", "completion": f"It is {i + k}."} for i in range(20)] for k in (1, 2)]
    files = [write_rows(tmp_path / f"{name}.jsonl", part) for name, part in zip(("ones", "twos"), rows)]
    made = config(base, files[0], tmp_path / "run", template="", validation="0.2", batch_size=2)
    run = Run.start(replace(made, sources=tuple(map(str, files)), weights=(3.0, 1.0)))
    inputs: Any = run.inputs
    sets = inputs.examples.numbers[SET]
    assert (sets == 0).sum() == 24
    assert (sets == 1).sum() == 8
    batch = inputs.windows(run.config, 96).read(range(4))
    assert any(len({*row.tolist()}) > 1 for row in batch.sequences)
    list(run.train())
    write_reports(tmp_path / "run")
    assert "validation loss of each source" in (tmp_path / "run" / "report.html").read_text()
    [last] = [row for row in metrics(tmp_path / "run") if "validation_loss" in row][-1:]
    both = [last["set_loss/ones"], last["set_loss/twos"]]
    assert min(both) <= last["validation_loss"] <= max(both)
    with pytest.raises(UserError, match="Cannot weight the sources, because kto reads all sources together: leave"):
        config(base, files[0], tmp_path / "other", method="kto", weights=(1.0,))


def ramps() -> st.SearchStrategy[MovingWeight]:
    shares = st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), min_size=2, max_size=2).map(sorted)
    weights = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    return st.tuples(weights, weights, shares).map(lambda one: Ramp(one[0], one[1], *one[2]))


@settings(max_examples=40)
@given(st.lists(ramps(), min_size=1, max_size=3), st.floats(0.01, 5), st.integers(1, 400))
def test_each_source_has_had_its_changing_share_up_to_every_window(
    moving: list[MovingWeight], constant: float, total: int
) -> None:
    weights: list[float | MovingWeight] = [constant, *moving]
    mixture = Curriculum(weights, total)
    sources, ranks = mixture.locate(np.arange(2 * total))
    fine = (np.arange(10_000) + 0.5) / 10_000
    values = np.array([np.interp(fine, *np.array(points_of(weight)).T) for weight in weights])
    # expected number of windows of each source up to each point of the run
    due = np.cumsum(values / values.sum(0), 1) * total / len(fine)
    for source in range(len(weights)):
        own = sources == source
        count = int(own[:total].sum())
        assert ranks[:total][own[:total]].tolist() == [*range(count)], "each window of a source once, in order"
        assert sorted(ranks[own]) == [*range(2 * count)], "beyond the run, too"
        wanted = np.interp(np.arange(1, total + 1) / total, np.arange(1, len(fine) + 1) / len(fine), due[source])
        assert np.abs(np.cumsum(own[:total]) - wanted).max() <= 1 + len(weights) / 2
    backwards = mixture.locate(np.arange(total)[::-1])[0][::-1]
    assert np.array_equal(backwards, sources[:total]), "a pure function of the window's number"


def test_a_ramp_that_stays_level_has_the_shares_of_a_constant_weight() -> None:
    level, constant = interleaving([Ramp(3.0, 3.0), 1.0], 10_000), interleaving([3.0, 1.0], 10_000)
    for one, other in zip(level.locate(np.arange(10_000)), constant.locate(np.arange(10_000))):
        assert np.array_equal(one, other)


def test_a_curriculum_moves_from_one_source_to_another_and_resumes_exactly(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    rows = [[{"prompt": f"{i} + {k}?", "completion": f"It is {i + k}."} for i in range(20)] for k in (1, 2)]
    files = [write_rows(tmp_path / f"{name}.jsonl", part) for name, part in zip(("easy", "hard"), rows)]
    weights = Ramp(1.0, 0.0, 0.25, 0.75), Ramp(0.0, 1.0, 0.25, 0.75)
    options: dict[str, Any] = {"template": "", "batch_size": 2, "steps": 8, "lora": 2, "validation": "none"}

    def started(name: str) -> Run:
        made = config(base, files[0], tmp_path / name, **options)
        return Run.start(replace(made, sources=tuple(map(str, files)), weights=weights))

    run = started("run")
    windows = run.inputs.windows(run.config, 96)
    found = [windows.read(range(i, i + 2)).numbers[SET].tolist() for i in range(0, 16, 2)]  # type: ignore[attr-defined]
    assert {*found[0], *found[1]} == {0}
    assert {*found[6], *found[7]} == {1}
    assert {0, 1} <= {*found[3], *found[4]}
    list(run.train(stop=lambda: run.step == 3))
    list(Run.resume(tmp_path / "run").train())
    list(started("whole").train())
    assert_same_adapters(tmp_path / "run", tmp_path / "whole")


def test_texts_take_weights_that_change_and_run_json_keeps_them(tmp_path: Path) -> None:
    files = [tmp_path / "first.txt", tmp_path / "second.txt"]
    for file, letters in zip(files, ("ab ", "xy ")):
        file.write_text(letters * 300)
    options = {"sources": [*map(str, files)], "weights": ["1", "ramp(last=4, begin=0.5, end=0.5)"], "steps": 4}
    options |= {"tokenizer": "byte", "preset": "tiny", "model": {"context_length": 16}, "out": str(tmp_path / "run")}
    run = Run.start(fields.build(RunConfig, options))
    assert read_config(tmp_path / "run").weights == (1.0, Ramp(0.0, 4.0, 0.5, 0.5))
    tokens = run.inputs.windows(run.config, 16).read(range(4 * 8)).tokens
    second = (tokens == run.tokenizer.encode("x")[0]).any(1)
    assert not second[:16].any()
    assert int(second[16:].sum()) == 13  # 16 * 4 / 5
    list(run.train())
    last = [row for row in metrics(tmp_path / "run") if "validation_loss" in row][-1]
    assert last["set_loss/first"] < last["validation_loss"] < last["set_loss/second"], "more of the first is seen"


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "an end before the beginning": ({"weights": (1, "ramp(begin=0.8, end=0.2)")}, "begin is 0.8 and end is 0.2"),
    "nothing for a while": (
        {"weights": ("ramp(first=1, last=0, end=0.3)", "ramp(first=0, last=1, begin=0.6)")},
        "all weights are 0 from 30% to 60% of the run: give a source a weight there",
    ),
    "a length that the clock decides": ({"weights": (1, "ramp()"), "steps": 0, "time": "9s"}, "give steps or epochs"),
    "no such kind": ({"weights": (1, "rump(last=2)")}, r"weights\[1\] is 'rump', .* did you mean ramp?"),
    "no such field": ({"weights": (1, "ramp(final=2)")}, r"weights\[1\].*final"),
    "out of range": ({"weights": (1, "ramp(last=-2)")}, "last is -2"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_in_weights_that_change_are_one_sentence(case: str) -> None:
    changes, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence):
        fields.build(RunConfig, {"sources": ["a.txt", "b.txt"], "steps": 9, **changes})
