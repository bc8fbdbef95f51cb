"""The numbers of a decoder, a run or a request, except seeds, have ranges, which are checked for values from Python,
from text and from files."""

import math
from fractions import Fraction
from typing import Any, get_args

import pytest

from onward import (
    Attention,
    Block,
    DecoderConfig,
    DynamicScaling,
    Experts,
    FeedForward,
    GenerationOptions,
    LayerNorm,
    Learned,
    LongRoPEScaling,
    Norm,
    Position,
    Rotary,
    Routing,
    RunConfig,
    Scaling,
    SelfAttention,
    UserError,
    YaRNScaling,
)
from onward.base import fields
from onward.base.arguments import OutOfRange
from onward.families import modules

from support.decoders import config

modules()  # imports the modules that define further parts
SLOTS: tuple[Any, ...] = Position, Attention, FeedForward, Norm, Block, Routing, Scaling
PARTS = [part for slot in SLOTS for part in slot.kinds.values() if part.__module__.startswith("onward.")]


def numeric(kind: Any) -> bool:
    return kind in (int, float) or any(map(numeric, get_args(kind)))


CONFIGS = DecoderConfig, RunConfig, GenerationOptions
WITHOUT = "model", "logit_bias", "seed"  # model and logit_bias are tables; a seed may be any integer
NUMBERS = [
    (cls, name)
    for cls in (*CONFIGS, *PARTS)
    for name, kind in fields.hints(cls).items()
    if numeric(kind) and name not in WITHOUT
]
SIZES = {"vocab_size": 13, "d_model": 16, "n_layers": 2, "n_heads": 4}


@pytest.mark.parametrize(("cls", "name"), NUMBERS, ids=[f"{cls.__name__}.{name}" for cls, name in NUMBERS])
def test_number_outside_of_its_range_is_refused(cls: Any, name: str) -> None:
    sizes: dict[str, Any] = SIZES if cls is DecoderConfig else {}
    several = get_args(fields.hints(cls)[name])[-1:] == (...,)
    for value in math.nan, math.inf, -math.inf, 1e300, -1e300, "many", [1], True:
        given: Any = (value,) if several else value
        with pytest.raises(UserError, match=f"{name} is .*it must be a (whole )?number from"):
            cls(**{**sizes, name: given})
        with pytest.raises(UserError, match=name):
            fields.build(cls, {**sizes, name: given}, "model")


PARTS_OUTSIDE: list[tuple[Any, dict[str, Any], str]] = [
    (Rotary, {"fraction": 0.0}, "position.rotary.fraction is 0.0: it must be a number from 1e-06 to 1"),
    (Rotary, {"theta": 1.0}, "position.rotary.theta is 1.0"),
    (Learned, {"offset": -1}, "position.learned.offset is -1"),
    (SelfAttention, {"window": -2}, "attention.self.window is -2"),
    (SelfAttention, {"attn_softcap": 0.0}, "attention.self.attn_softcap is 0.0"),
    (Experts, {"top_k": 0}, "top_k is 0"),
    (Experts, {"d_shared": -1}, "d_shared is -1"),
    (Experts, {"count": 2.5}, "count is 2.5"),
    (LayerNorm, {"eps": -1}, "norm.layer.eps is -1"),
    (YaRNScaling, {"beta_fast": 0}, "scaling.yarn.beta_fast is 0"),
    (DynamicScaling, {"factor": 0.0}, "scaling.dynamic.factor is 0.0"),
    (LongRoPEScaling, {"short": (1.0, 0.0)}, "scaling.longrope.short is (1.0, 0.0)"),
]


@pytest.mark.parametrize(
    ("part", "values", "sentence"), PARTS_OUTSIDE, ids=[sentence for *_, sentence in PARTS_OUTSIDE]
)
def test_range_names_part_field_and_value(part: Any, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OutOfRange) as error:
        part(**values)
    assert sentence in str(error.value)


def test_range_of_a_nested_part_is_checked_where_it_is_built() -> None:
    with pytest.raises(UserError, match=r"model\.norm\.rms\.eps is -1"):
        fields.build(DecoderConfig, {**SIZES, "norm": "rms(eps=-1)"}, "model")


def test_whole_number_written_as_a_fraction_becomes_an_int() -> None:
    assert type(config(d_ff=24.0).d_ff) is int
    assert type(SelfAttention(window=Fraction(3)).window) is int  # type: ignore[arg-type]
