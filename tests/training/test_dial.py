"""The size of a model is chosen to fit the time limit of its run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward import Decoder, Run, RunConfig, Tokens, UserError, train_tokenizer
from onward.training.clock.dial import LAW, SIZES, Choice, compression, dial, effective
from onward.training.inputs.texts import Inputs

from support.runs import config

TEXT = "the quick brown fox jumps over the lazy dog and the cat. "
TOKENIZER = train_tokenizer("char", [TEXT])
WORDS = np.random.default_rng(0).choice(TEXT.split(), 40_000)
TOKENS = Tokens.of(np.array(TOKENIZER.encode(" ".join(WORDS)), dtype=np.uint16))
INPUTS = Inputs((TOKENS,), None, 0)


def chosen(limit: float, speed: float = 2e6, inputs: Inputs = INPUTS, **given: Any) -> tuple[RunConfig, Choice]:
    """The choice on a machine where a step takes 1 ms plus one second per `speed` parameters."""
    timing = lambda config, model, *_: 1e-3 + sum(p.numel() for p in model.parameters()) / speed
    found, choice = dial(RunConfig(time="1m", **given), TOKENIZER, inputs, torch.device("cpu"), limit, None, timing)
    assert choice is not None
    return found, choice


def test_more_time_or_a_faster_machine_never_makes_the_model_smaller() -> None:
    sizes = [chosen(limit)[1].chosen.parameters for limit in (1, 60, 600, 3600)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert chosen(60, speed=1e8)[1].chosen.parameters > chosen(60, speed=1e6)[1].chosen.parameters


def test_the_chosen_size_has_the_best_forecast_of_those_that_were_timed() -> None:
    found, choice = chosen(600)
    assert choice.chosen.bits_per_byte == min(one.bits_per_byte for one in choice.candidates)
    assert found.model == choice.chosen.model
    low, high = choice.loss
    nats = choice.chosen.bits_per_byte * np.log(2) * compression(TOKENIZER, INPUTS).bytes_per_token
    assert low < nats < high


@pytest.mark.parametrize(("compilation", "expected"), [(0.01, [64, 96]), (0.3, [64])])
def test_timing_takes_a_small_share_of_the_time(compilation: float, expected: list[int]) -> None:
    now, widths = 0.0, []

    def timing(config: RunConfig, model: Decoder, *_: object) -> float:
        nonlocal now
        step = sum(p.numel() for p in model.parameters()) / 3e7
        now += compilation + 4 * step
        widths.append(model.config.d_model)
        return step

    dial(RunConfig(time="10s"), TOKENIZER, INPUTS, torch.device("cpu"), 10.0, None, timing, lambda: now)
    assert now <= 0.05 * 10
    assert widths == expected


GIVEN: list[dict[str, Any]] = [
    {"model": {"d_model": 32, "n_heads": 2}},
    {"model": {"n_layers": 1}},
    {"model": {"context_length": 64}},
    {"batch_size": 3},
    {"optimizer": "adamw"},
    {"learning_rate": 1e-3},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_options_that_are_given_are_kept(given: dict[str, Any]) -> None:
    found, choice = chosen(60, **given)
    for name, value in given.items():
        assert getattr(found, name) == value | choice.chosen.model if name == "model" else value
    assert not choice.chosen.model.keys() & given.get("model", {}).keys()


def test_a_text_that_is_read_again_counts_less() -> None:
    assert effective(1000, 1000) == 1000
    assert 1000 < effective(4000, 1000) < 4000
    assert effective(1e9, 1000) < 17_000
    few = Inputs((TOKENS.part(0, 20_000),), None, 0)
    assert chosen(600, inputs=few)[1].chosen.bits_per_byte > chosen(600)[1].chosen.bits_per_byte


def test_the_law_falls_with_parameters_and_with_bytes() -> None:
    assert LAW.loss(1e6, 1e6) > LAW.loss(2e6, 1e6) > LAW.loss(2e6, 2e6) > LAW.E
    assert sorted(SIZES, key=lambda size: size["d_model"]) == SIZES


def test_a_run_of_a_given_time_trains_what_is_chosen(story_file: Path, tmp_path: Path) -> None:
    given = {"steps": 0, "time": "3s", "model": {"d_model": 16, "n_heads": 2}, "batch_size": 0, "learning_rate": None}
    run = Run.start(config(story_file, tmp_path / "run", **given))
    assert run.choice is not None
    assert run.choice.chosen.model.items() <= run.config.model.items()
    assert (run.config.optimizer, run.config.batch_size) == ("normuon", run.choice.chosen.batch_size)
    assert run.model.config.d_model == 16
    assert "forecast: validation loss" in str(run.choice)
    recorded = json.loads((run.folder / "run.json").read_text())
    assert recorded["model"] == run.config.model
    assert Run.resume(run.folder).choice is None, "a resumed run keeps the chosen size"


@pytest.mark.parametrize("time", ["0.5s", "0.01"])
def test_a_time_too_small_for_any_run_is_refused(time: str, story_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too short to train a model: give at least a second"):
        config(story_file, tmp_path / "run", steps=0, time=time)
