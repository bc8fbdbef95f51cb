"""A run's configuration as a value."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from onward import (
    Experts,
    Gated,
    LatentAttention,
    LayerNorm,
    Learned,
    Llama3Scaling,
    Rotary,
    RunConfig,
    SelfAttention,
    UserError,
)
from onward.base.fields import build, plain
from onward.families import preset, presets
from onward.training.config import seconds
from onward.training.presets import PRESETS, merge, resize, unnamed_changes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("100s", 100), ("5m", 300), ("2h", 7200), ("100", 100), ("1.5 m", 90), (" 3s ", 3)],
        *[("10 sec", 10), ("10 seconds", 10), ("1 Second", 1), ("5 min", 300), ("5minutes", 300), ("2 hours", 7200)],
    ],
)
def test_durations_are_read(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "0", "0s", "-3s", "5 years", "1e3s", "nan", "s", "1:30", "١s" * 2])
def test_other_durations_are_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match="write a number with s, m or h"):
        seconds(text)


BAD = [
    {"steps": 3, "time": "5s"},
    {"steps": 3, "epochs": 1.0},
    {"steps": -1},
    {"batch_size": -1},
    {"batch_size": 10**39},
    {"accumulation": 100_000_000},
    {"accumulation": 0},
    {"learning_rate": -1.0},
    *[{name: float("nan")} for name in ("learning_rate", "weight_decay", "clip", "epochs")],
    {"beta1": 1.5},
    {"beta2": -0.1},
    {"warmup": -1.0},
    {"min_lr_ratio": float("nan")},
    {"time": "soon"},
    {"preset": "huge"},
    {"preset": "smal"},
    {"preset": "llama2-7b"},
    {"precision": "fp8"},
    {"schedule": "cosin"},
    {"pack": "none"},
    {"track": ["tensorbord"]},
    {"weights": [1.0, 0.0]},
    {"average": 1.0},
    {"label_smoothing": -0.1},
    {"z_loss": float("inf")},
    {"keep": 0},
    {"decay": -1.0},
    {"nonsense": 1},
    {"sources": ["a\0.txt"]},
    {"out": "a\0"},
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


@pytest.mark.parametrize("size", PRESETS)
def test_presets_of_our_own_differ_in_size_alone(size: str) -> None:
    config = RunConfig(preset=size).decoder(500)
    assert config.vocab_size == 500
    assert config.tied
    assert config.d_model == PRESETS[size]["d_model"]


def test_fields_of_the_model_and_of_its_parts_can_be_changed() -> None:
    config = RunConfig(
        model={"position": {"theta": 5e5}, "attention": {"window": 8}, "norm": "layer", "n_layers": "3"}
    ).decoder(500)
    assert config.position == Rotary(theta=5e5)
    assert config.attention == SelfAttention(qk_norm="head", window=8), "fields that are not named keep their values"
    assert config.norm == LayerNorm()
    assert config.n_layers == 3
    assert RunConfig(model={"position": "learned"}).decoder(500).position == Learned()


@pytest.mark.parametrize("name", presets())
def test_every_release_is_a_preset_with_the_tokenizer_s_vocabulary(name: str) -> None:
    config = preset(name).config
    assert resize(config, {}) == config
    assert RunConfig(preset=name).decoder(500) == replace(config, vocab_size=500)


FOLLOW = [  # preset, changes, resulting fields of the decoder
    ("gpt2", {"d_model": 96}, {"d_head": 8, "d_ff": 384, "d_embed": 96, "n_heads": 12, "context_length": 1024}),
    ("gpt2", {"n_heads": 4}, {"n_kv_heads": 4, "d_head": 192, "d_ff": 3072, "d_model": 768}),
    ("gpt2", {"mlp": "gated"}, {"d_ff": 2048, "mlp": Gated()}),
    ("llama-2-7b", {"d_model": "256", "n_heads": "8"}, {"n_kv_heads": 8, "d_head": 32, "d_ff": 688}),
    ("llama-2-7b", {"d_model": 256, "d_ff": 100, "d_head": 8}, {"d_head": 8, "d_ff": 100}),
    ("llama-2-7b", {"d_model": 64, "n_heads": 8, "n_kv_heads": 2}, {"n_kv_heads": 2, "d_head": 8}),
    ("llama-2-70b", {"n_heads": 16}, {"n_kv_heads": 8, "d_head": 512}),
    ("falcon-7b", {"d_model": 64, "n_heads": 4}, {"n_kv_heads": 1, "d_head": 16}),
    ("gemma-7b", {"d_model": 64}, {"d_head": 256, "embed_scale": 8.0, "d_ff": 512}),
    ("gemma-7b", {"d_model": 64, "embed_scale": 3.0}, {"embed_scale": 3.0}),
    ("granite-3.0-2b", {"d_model": 64, "n_heads": 4, "n_kv_heads": 4}, {"embed_scale": 12.0}),
    ("opt-350m", {"d_model": 64, "n_heads": 4}, {"d_embed": 512, "d_head": 16}),
    ("llama-3.1-8b", {"position": {"theta": 1e4}}, {"position": Rotary(1e4, scaling=Llama3Scaling())}),
    ("mini", {"d_model": 64}, {"d_ff": 192, "d_head": 16}),
]


@pytest.mark.parametrize(("name", "changes", "expected"), FOLLOW)
def test_what_followed_from_the_sizes_follows_again(name: str, changes: dict, expected: dict) -> None:
    config = RunConfig(preset=name, model=changes).decoder(500)
    assert {field: getattr(config, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gpt2", {"d_model": 100}, "d_model 100 is not divisible by n_heads 12"),
        ("gpt2", {"d_model": -96}, "d_model is -96"),
        ("gemma-7b", {"d_model": -96}, "d_model is -96"),
        ("gpt2", {"d_model": "wide"}, "model.d_model is 'wide'"),
        ("gpt2", {"n_hedas": 3}, "did you mean n_heads"),
        ("gemma-2-2b", {"attention": {"window": 3}}, "model.attention consists of several parts"),
        ("phi-3-mini-128k", {"n_heads": 16}, "96 of each"),
        ("gpt2", {"vocab_size": 5}, "raise it"),
    ],
)
def test_changes_that_cannot_be_are_one_sentence(name: str, changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        RunConfig(preset=name, model=changes).decoder(500)


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"kind": "rotary", "theta": 5}, {"fraction": 1}, {"kind": "rotary", "theta": 5, "fraction": 1}),
        ("rotary(theta=5)", {"fraction": 1}, {"kind": "rotary", "theta": 5, "fraction": 1}),
        ("rotary(theta=5)", "alibi", {"kind": "alibi"}),
        ({"kind": "rotary", "theta": 5}, {"kind": "alibi"}, {"kind": "alibi"}),
        (["rotary", "none"], "alibi", {"kind": "alibi"}),
        ("rotary(theta=5)", "(rotary, none)", [{"kind": "rotary", "theta": 5}, {"kind": "none"}]),
        (["rotary(theta=5)", "none"], "rotary(fraction=0.5)", {"kind": "rotary", "theta": 5, "fraction": 0.5}),
        (["rotary(theta=5)", "rotary(theta=6)"], "rotary", {"kind": "rotary"}),
    ],
    ids=str,
)
def test_fields_go_into_the_part_that_is_there(base: object, over: object, expected: object) -> None:
    found = merge({"steps": 3, "model": {"position": base}}, {"model": {"position": over, "n_layers": 2}})
    assert found == {"steps": 3, "model": {"position": expected, "n_layers": 2}}


@pytest.mark.parametrize("parts", [["rotary", "none"], "(rotary, none)"], ids=str)
def test_fields_of_one_of_several_parts_are_not_guessed(parts: object) -> None:
    with pytest.raises(UserError, match=r"model\.position consists of several parts: write theta inside each of them"):
        merge({"model": {"position": parts}}, {"model": {"position": {"theta": 3}}})


HEAD = SelfAttention(qk_norm="head")
GEMMA = SelfAttention(attn_softcap=50.0)
KEPT: list[tuple[str, Any, Any]] = [  # preset, attention as given, attention of the decoder
    ("mini", "(self(window=32), self)", (SelfAttention(window=32, qk_norm="head"), HEAD)),
    ("mini", {"kind": "self", "window": 32}, SelfAttention(window=32, qk_norm="head")),
    ("mini", SelfAttention(window=32), SelfAttention(window=32, qk_norm="head")),
    ("mini", SelfAttention(window=32, qk_norm="none"), SelfAttention(window=32)),
    ("mini", SelfAttention(32, None, None, False, "none"), SelfAttention(window=32)),
    ("mini", copy.deepcopy(SelfAttention(window=32)), SelfAttention(window=32, qk_norm="head")),
    ("mini", (SelfAttention(window=32), SelfAttention()), (SelfAttention(window=32, qk_norm="head"), HEAD)),
    ("mini", ["self(window=32)", {"kind": "self"}], (SelfAttention(window=32, qk_norm="head"), HEAD)),
    ("mini", "self(qk_norm=none)", SelfAttention()),
    ("mini", "latent(d_latent=8)", LatentAttention(d_latent=8)),
    ("gemma-2-9b", "self", GEMMA),
]


@pytest.mark.parametrize(("name", "attention", "expected"), KEPT, ids=str)
def test_a_part_of_the_same_kind_keeps_the_fields_that_are_not_named(name: str, attention: Any, expected: Any) -> None:
    config = RunConfig(preset=name, model={"attention": attention})
    assert config.decoder(500).attention == expected
    assert build(RunConfig, json.loads(json.dumps(plain(config)))).decoder(500).attention == expected, (
        "when resumed too"
    )


def test_fields_of_parts_inside_parts_are_kept_as_well() -> None:
    config = RunConfig(preset="llama-3.1-8b", model={"position": "rotary(scaling=llama3(factor=2))"}).decoder(500)
    assert config.position == Rotary(5e5, scaling=Llama3Scaling(factor=2.0))
    sparse = {"mlp": Experts(top_k=3)}
    assert RunConfig(preset="mixtral-8x7b", model=sparse).decoder(500).mlp == Experts(count=8, top_k=3)
    assert RunConfig(preset="gpt", model={"final_norm": "none"}).decoder(500).final_norm is None


UNNAMED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("mini", {}, []),
    ("mini", {"attention": "(self(window=32), self)"}, []),
    ("mini", {"position": "alibi", "n_layers": 2}, ["position.theta 10,000 -> absent"]),
    ("mini", {"norm": "layer"}, ["norm.eps 1e-06 -> 1e-05", "biases none -> norms"]),
    ("mini", {"norm": "layer(eps=1e-6, bias=true)"}, []),
    ("gpt2", {"mlp": "gated"}, ["d_ff 3,072 -> 2,048", "mlp.act gelu_tanh -> silu", "biases q, k, v, out, mlp, norms"]),
    ("gpt2", {"d_model": 96}, ["d_head 64 -> 8", "d_ff 3,072 -> 384"]),
    ("gpt2", {"d_model": 96, "d_head": 8, "d_ff": 384}, []),
    ("gemma-2-9b", {"attention": SelfAttention()}, ["attention.window"]),
    ("mini", {"attention": "latent"}, ["attention.qk_norm head -> absent", "attention.d_value"]),
]


@pytest.mark.parametrize(("name", "changes", "expected"), UNNAMED, ids=str)
def test_changes_that_are_not_named_are_listed(name: str, changes: dict[str, Any], expected: list[str]) -> None:
    found = unnamed_changes(name, RunConfig(preset=name, model=changes).decoder(500), changes)
    assert [text[: len(beginning)] for text, beginning in zip(found, expected, strict=True)] == expected


def test_a_configuration_survives_json() -> None:
    config = RunConfig(sources=("a", "b"), steps=3, model={"position": {"theta": 5e5}})
    assert build(RunConfig, plain(config)) == config


def test_configurations_do_not_import_torch() -> None:
    program = "import onward.training.config, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
