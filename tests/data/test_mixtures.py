"""Mixtures of data sets: shares by weights, packing across sets, and a validation loss of each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.data.examples import Examples
from onward.data.mixtures import SET, joined, one_set, weighted
from onward.errors import UserError
from onward.training.run.run import Run

from support.finetuning import base_model, config, write_rows
from support.runs import metrics


def table(count: int, first: int) -> Examples:
    """Examples of one token each, numbered from `first`, each with a number."""
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
        assert times.max() - times.min() <= 1, "no example comes twice more often than another"
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
    [last] = [row for row in metrics(tmp_path / "run") if "validation_loss" in row][-1:]
    both = [last["set_loss/ones"], last["set_loss/twos"]]
    assert min(both) <= last["validation_loss"] <= max(both)
    with pytest.raises(UserError, match="weights are given, and kto reads all sources as one: leave them out"):
        config(base, files[0], tmp_path / "other", method="kto", weights=(1.0,))
