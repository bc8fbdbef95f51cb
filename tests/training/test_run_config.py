"""A run's configuration as a value."""

import subprocess
import sys

import pytest

from onward.errors import UserError
from onward.fields import build, plain
from onward.model.config import LayerNorm, Learned, Rotary, SelfAttention
from onward.training.config import PRESETS, RunConfig, seconds


@pytest.mark.parametrize(
    ("text", "expected"), [("100s", 100), ("5m", 300), ("2h", 7200), ("100", 100), ("1.5 m", 90), (" 3s ", 3)]
)
def test_durations_are_read(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "0", "0s", "-3s", "5 minutes", "1e3s", "nan", "s", "1:30", "١s" * 2])
def test_other_durations_are_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match="write it like 100s, 5m or 2h"):
        seconds(text)


BAD = [
    {"steps": 3, "time": "5s"},
    {"steps": 3, "epochs": 1.0},
    {"steps": -1},
    {"batch_size": 0},
    {"accumulation": 0},
    {"learning_rate": -1.0},
    *[{name: float("nan")} for name in ("learning_rate", "weight_decay", "clip", "epochs")],
    {"beta1": 1.5},
    {"beta2": -0.1},
    {"warmup": 2.0},
    {"final_share": float("nan")},
    {"time": "soon"},
    {"preset": "huge"},
    {"precision": "fp8"},
    {"nonsense": 1},
]


@pytest.mark.parametrize("values", BAD, ids=str)
def test_values_out_of_range_or_in_contradiction_are_one_sentence(values: dict) -> None:
    with pytest.raises(UserError) as caught:
        build(RunConfig, values)
    assert any(name in str(caught.value) for name in values)
    assert "\n" not in str(caught.value)


def test_no_sources_are_one_sentence() -> None:
    with pytest.raises(UserError, match="no text to train on"):
        RunConfig(sources=())


def test_without_a_length_a_run_takes_five_minutes() -> None:
    assert RunConfig().time == "5m"
    assert RunConfig(steps=3).time == ""


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_differ_in_size_alone(preset: str) -> None:
    config = RunConfig(preset=preset).decoder(500)  # type: ignore[arg-type]
    assert config.vocab_size == 500
    assert config.tied
    assert config.d_model == PRESETS[preset]["d_model"]


def test_fields_of_the_model_and_of_its_parts_can_be_changed() -> None:
    config = RunConfig(
        model={"position": {"theta": 5e5}, "attention": {"window": 8}, "norm": "layer", "n_layers": "3"}
    ).decoder(500)
    assert config.position == Rotary(theta=5e5)
    assert config.attention == SelfAttention(qk_norm="head", window=8), "what is not named stays"
    assert config.norm == LayerNorm()
    assert config.n_layers == 3
    assert RunConfig(model={"position": "learned"}).decoder(500).position == Learned()


def test_a_configuration_survives_json() -> None:
    config = RunConfig(sources=("a", "b"), steps=3, model={"position": {"theta": 5e5}})
    assert build(RunConfig, plain(config)) == config


def test_configurations_do_not_import_torch() -> None:
    program = "import onward.training.config, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
