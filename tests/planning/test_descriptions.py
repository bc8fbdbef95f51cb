"""Descriptions of decoders, and of the differences between two decoders."""

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from onward import (
    Alibi,
    AttentionOnly,
    DecoderConfig,
    Experts,
    Gated,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NoPosition,
    Plain,
    Position,
    Rotary,
    SelfAttention,
)
from onward.base.fields import text
from onward.families import presets
from onward.planning import descriptions
from onward.planning.descriptions import describe, describe_parts, differences, facts, sentence

from support.decoders import DECODERS, config

GPT2 = config(
    position=Learned(),
    norm=LayerNorm(),
    mlp=Plain(bias=True),
    attention=SelfAttention(bias=True, out_bias=True),
    tied=True,
    context_length=1024,
)
LLAMA = config(context_length=4096, n_kv_heads=1)


def changed(before: DecoderConfig, after: DecoderConfig) -> dict[str, tuple[str, str]]:
    return {change.what: (text(change.before), text(change.after)) for change in differences(before, after)}


def test_differences_have_names_and_values() -> None:
    found = changed(GPT2, LLAMA)
    assert found["context_length"] == ("1,024", "4,096")
    assert found["biases"] == ("q, k, v, out, mlp, norms", "none")
    assert found["tied"] == ("yes", "no")
    assert found["grouping"] == (
        "multi-head: each head has its own keys and values",
        "multi-query: 4 heads share keys and values",
    )
    assert found["position"][0] == "Learned: a trained vector per position (GPT)"
    assert found["position"][1].startswith("Rotary: queries and keys rotated by angles proportional")
    assert found["position.theta"] == ("", "10,000")
    assert found["mlp.act"] == ("gelu", "silu")
    assert found["norm"][0].startswith("LayerNorm: centered")
    assert found["norm"][1].endswith("not centered (Zhang and Sennrich 2019)")
    assert not {"block", "n_layers", "d_model", "norm.eps", "norm.bias", "head_bias"} & {*found}


ONE_FIELD: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "position.theta": ({"position": Rotary(theta=5e5)}, ("10,000", "500,000")),
    "position.scaling": ({"position": Rotary(scaling=LinearScaling(2.0))}, ("none", "LinearScaling: positions")),
    "attention.window": ({"attention": SelfAttention(window=4)}, ("all", "4")),
    "attention.scale": ({"attention": SelfAttention(scale=0.25)}, ("d_head ** -0.5", "0.25")),
    "attention.sinks": ({"attention": SelfAttention(sinks=True)}, ("no", "yes")),
    "embed_scale": ({"embed_scale": 4.0}, ("1", "4")),
    "logit_softcap": ({"logit_softcap": 30.0}, ("none", "30")),
    "final_norm": ({"final_norm": LayerNorm(bias=False)}, ("as in the blocks", "LayerNorm: centered")),
    "d_embed": ({"d_embed": 6}, ("16", "6")),
    "biases": ({"head_bias": True}, ("none", "head")),
}


@pytest.mark.parametrize("what", ONE_FIELD)
def test_difference_of_one_field_has_the_name_of_the_field(what: str) -> None:
    change, (before, after) = ONE_FIELD[what]
    there, back = changed(config(), config(**change)), changed(config(**change), config())
    assert there[what][0] == before
    assert there[what][1].startswith(after)
    assert back == {key: (b, a) for key, (a, b) in there.items()}


def test_different_decoders_have_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptions, "facts", cache(lambda config: [*facts(config)]))
    for a, b in product(DECODERS, repeat=2):
        assert bool(differences(DECODERS[a], DECODERS[b])) == (a != b), (a, b)


LAYERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "windows": (
        {"n_layers": 6, "attention": (*[SelfAttention(window=4)] * 5, SelfAttention())},
        "attention.window",
        "4 (5 of 6 layers); all (1 of 6 layers)",
    ),
    "sixty": (
        {"n_layers": 60, "position": tuple(Rotary(theta=float(i)) for i in range(2, 62))},
        "position.theta",
        "2 (1 of 60 layers); 3 (1 of 60 layers); 4 (1 of 60 layers); 5 (1 of 60 layers); others (56 of 60 layers)",
    ),
    "where it is": (
        {"n_layers": 3, "mlp": (Gated(), Experts(count=4), Experts(count=4))},
        "mlp.count",
        "4",
    ),
    "factors": (
        {"d_model": 192, "position": Rotary(scaling=LongRoPEScaling(tuple(range(1, 25)), (2.5,) * 24))},
        "position.scaling.short",
        "24 from 1 to 24",
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_values_that_differ_over_the_layers_are_counted(case: str) -> None:
    changes, what, expected = LAYERS[case]
    assert {fact.what: text(fact.value) for fact in describe(config(**changes))}[what] == expected


def test_alternating_parts_are_both_named() -> None:
    found = {fact.what: fact.value for fact in describe(config(n_layers=4, position=(Rotary(), Alibi(), Rotary())))}
    assert found["position"].startswith("Rotary: queries and keys")
    assert "(3 of 4 layers); Alibi: attention scores lowered" in found["position"]
    assert (found["position.theta"], found["position.steepness"]) == (10_000, 8)


def test_neutral_defaults_are_not_listed() -> None:
    found = {fact.what for fact in describe(config())}
    assert found >= {"parameters", "d_model", "position", "position.theta", "norm.eps"}
    assert not {"active parameters", "key/value bytes, windows full", "attention.window", "dropout", "d_embed"} & found
    mixed = {fact.what for fact in describe(config(mlp=Experts(), attention=SelfAttention(window=4)))}
    assert mixed >= {"active parameters", "key/value bytes, windows full", "attention.window", "mlp.router"}


def test_width_of_the_feed_forward_is_listed_where_a_layer_has_it() -> None:
    cases = {Experts(d_ff=24): False, Experts(): True, (Gated(), Experts(d_ff=24)): True}
    assert {mlp: any(fact.what == "d_ff" for fact in describe(config(mlp=mlp))) for mlp in cases} == cases


def test_window_longer_than_the_context_saves_no_memory() -> None:
    found = {fact.what for fact in describe(config(attention=SelfAttention(window=13)))}
    assert "attention.window" in found
    assert "key/value bytes, windows full" not in found


def test_every_fact_has_a_meaning_without_special_values() -> None:
    for decoder in DECODERS.values():
        for fact in describe(decoder):
            assert fact.meaning
            assert not re.search("; (0|none):", fact.meaning)


def test_part_of_a_user_is_described_by_its_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Position, "kinds", dict(Position.kinds))

    @dataclass(frozen=True)
    class Clock(NoPosition, kind="clock"):
        """Hands that turn. They are never late."""

        hands: int = 2

    found = changed(config(), replace(config(), position=Clock(hands=3)))
    assert found["position"][1] == "Clock: hands that turn"
    assert found["position.hands"] == ("", "3")


@pytest.mark.parametrize(
    ("doc", "expected"),
    [
        ("One. Two.", "One"),
        ("Position (Su et al. 2021), in\nhalves. More.", "Position (Su et al. 2021), in halves"),
        ("x + f(x)\n\nMore", "x + f(x)"),
        ("", ""),
    ],
)
def test_sentence_is_the_first_of_the_docstring(doc: str, expected: str) -> None:
    assert sentence(type("Part", (), {"__doc__": doc})) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ""), (True, "yes"), (False, "no"), (50_257, "50,257"), (1e-5, "1e-05"), (5e5, "500,000"), (0.25, "0.25")],
)
def test_values_are_printed_with_separators(value: Any, expected: str) -> None:
    assert text(value) == expected


def test_description_of_a_preset_fits_a_screen() -> None:
    for preset in [*presets().values()][::5]:
        facts = describe(preset.config)
        assert len(facts) < 50, preset.name
        assert all(len(text(fact.value)) < 400 for fact in facts), preset.name


def test_scalings_differ_field_by_field() -> None:
    found = changed(
        config(position=Rotary(scaling=Llama3Scaling())), config(position=Rotary(scaling=Llama3Scaling(factor=32.0)))
    )
    assert found == {"position.scaling.factor": ("8", "32")}


DESCRIBED: dict[str, tuple[dict[str, Any], str, str]] = {
    "sizes": ({}, "layers", "2 of width 16, context 12"),
    "a theta that is the default": ({}, "positions", "rotary, theta 10,000"),
    "positions without a theta": ({"position": Alibi()}, "positions", "alibi"),
    "heads that share keys and values": (
        {"n_heads": 4, "n_kv_heads": 2, "attention": SelfAttention(window=3, qk_norm="head")},
        "attention",
        "self, 4 heads of 4, 2 for keys and values, window 3, qk_norm head",
    ),
    "the width of an expert": (
        {"mlp": Experts(count=4, top_k=3, d_ff=24, d_shared=8)},
        "feed-forward",
        "experts, 4 of width 24, 3 per token, a shared expert of width 8, silu",
    ),
    "layers that differ": (
        {"n_layers": 3, "mlp": (Gated(), Experts(d_ff=24), Experts(d_ff=24))},
        "feed-forward",
        "experts, 8 of width 24, 2 per token, silu (2 of 3 layers); gated, width 64, silu (1 of 3 layers)",
    ),
    "blocks without a feed-forward": ({"block": AttentionOnly()}, "feed-forward", "none"),
}


@pytest.mark.parametrize("case", DESCRIBED)
def test_each_part_is_described_in_a_line(case: str) -> None:
    changes, label, expected = DESCRIBED[case]
    assert dict(describe_parts(config(**changes)))[label] == expected
