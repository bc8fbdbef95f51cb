"""Values from text and JSON: either the right type or a UserError, and back again unchanged."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onward import (
    Attention,
    DecoderConfig,
    FeedForward,
    Gated,
    LayerNorm,
    Norm,
    Plain,
    Position,
    RMSNorm,
    Rotary,
    SelfAttention,
    UserError,
)
from onward.base import fields

from support.decoders import DECODERS


@dataclass(frozen=True)
class Every:
    """A field of every supported type."""

    whole: int  # how many
    number: float = 0.5  # how much
    word: str = ""
    choice: Literal["a", "b"] = "a"
    yes: bool = False
    maybe: float | None = None
    pair: tuple[int, float] = (1, 2.0)
    several: tuple[str, ...] = ()
    norm: Norm | tuple[Norm, ...] = RMSNorm()
    table: dict[str, Any] = field(default_factory=dict)
    inner: Rotary = Rotary()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KINDS = sorted({kind for slot in (Position, Attention, FeedForward, Norm) for kind in slot.kinds})
NAMES = [*KINDS, "eps", "act", "window", "theta", "relu", "true", "none", "kind"]
NOTATION = st.lists(st.sampled_from([*NAMES, *"()[]{}=,:'*-.+ 0129", "1e9", "\n", "**"]), max_size=12).map("".join)
CHOICES = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3).map(lambda d: {"kind": "rms"} | d)
slots = st.sampled_from([Position, Attention, FeedForward, Norm])


def value_or_sentence(read: Callable[[], Any]) -> Any:
    """The value; None if it is refused with a message that begins with "here"."""
    try:
        return read()
    except UserError as error:
        assert str(error).startswith("here")  # noqa: PT017
        return None


@given(slot=slots, value=st.text() | NOTATION | JSON | CHOICES)
@example(slot=Norm, value="{[]: 1}")
@example(slot=Norm, value="{'kind': 'rms', 1: 2}")
@example(slot=Norm, value="(" * 10_000)
@example(slot=Norm, value="-" * 5_000 + "1")
@example(slot=Norm, value="rms(**{})")
@example(slot=Norm, value="rms(1)")
@example(slot=Norm, value="\0")
@example(slot=Norm, value="rms(eps=" + "9" * 5_000 + ")")
@example(slot=Attention, value={"kind": "self", "window": 1e400})
def test_anything_is_a_part_or_refused(slot: type[fields.Part], value: Any) -> None:
    part = value_or_sentence(lambda: fields.part(slot, value, "here"))
    assert part is None or fields.part(slot, fields.plain(part), "here") == part


@given(name=st.sampled_from(list(fields.hints(Every))), value=st.text() | NOTATION | JSON | CHOICES)
@example(name="whole", value="1e400")
@example(name="whole", value="²")
@example(name="number", value=10**400)
@example(name="pair", value="(1,)")
@example(name="norm", value="(rms, {[]: 1})")
def test_anything_converts_or_is_refused(name: str, value: Any) -> None:
    kind = fields.hints(Every)[name]
    made = value_or_sentence(lambda: fields.convert(kind, value, "here"))
    if made is not None and made == made:  # not NaN
        again = fields.convert(kind, fields.plain(made), "here")
        assert again == made or "nan" in repr(made)


@given(st.text() | NOTATION)
def test_any_text_parses_or_is_refused(text: str) -> None:
    value_or_sentence(lambda: fields.parse(text, "here"))


@given(st.dictionaries(st.sampled_from(list(fields.hints(DecoderConfig))), JSON | CHOICES | NOTATION, max_size=4))
def test_any_table_is_a_config_or_refused(changes: dict[str, Any]) -> None:
    with contextlib.suppress(UserError):
        fields.build(DecoderConfig, fields.plain(DECODERS["llama"]) | changes)


every = st.builds(
    Every,
    whole=st.integers(),
    number=st.floats(allow_nan=False, allow_infinity=False),
    word=st.text(),
    choice=st.sampled_from(["a", "b"]),
    yes=st.booleans(),
    maybe=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    pair=st.tuples(st.integers(), st.floats(0, 1)),
    several=st.lists(st.text()).map(tuple),
    norm=st.sampled_from([RMSNorm(), LayerNorm(bias=False), (RMSNorm(eps=0.1), LayerNorm())]),
    table=st.dictionaries(st.text(), st.integers()),
    inner=st.builds(Rotary, st.floats(2, 9)),
)


@given(every)
def test_plain_values_build_an_equal_dataclass(value: Every) -> None:
    assert fields.build(Every, json.loads(json.dumps(fields.plain(value)))) == value


READ: list[tuple[str, Any, Any]] = [
    ("whole", "12", 12),
    ("whole", "1e3", 1000),
    ("whole", 3.0, 3),
    ("whole", "12345678901234567890", 12345678901234567890),
    ("number", "3", 3.0),
    ("number", "6e-4", 6e-4),
    ("yes", "true", True),
    ("yes", "false", False),
    ("maybe", "none", None),
    ("maybe", "2", 2.0),
    ("pair", "(3, 0.5)", (3, 0.5)),
    ("pair", [3, 1], (3, 1.0)),
    ("norm", "rms", RMSNorm()),
    ("norm", "rms(eps=1e-6)", RMSNorm(eps=1e-6)),
    ("norm", "layer(bias=false)", LayerNorm(bias=False)),
    ("norm", "(rms, layer(eps=1))", (RMSNorm(), LayerNorm(eps=1.0))),
    ("norm", {"kind": "rms", "eps": 1}, RMSNorm(eps=1.0)),
    ("norm", ["rms", {"kind": "layer"}], (RMSNorm(), LayerNorm())),
]


@pytest.mark.parametrize(("name", "value", "wanted"), READ, ids=str)
def test_values_are_read_as_they_are_written(name: str, value: Any, wanted: Any) -> None:
    got = fields.convert(fields.hints(Every)[name], value, "here")
    assert got == wanted
    assert type(got) is type(wanted)


def test_names_inside_a_part_need_no_quotes() -> None:
    assert fields.part(FeedForward, "plain(act=relu, bias=true)", "mlp") == Plain(act="relu", bias=True)
    assert fields.part(FeedForward, "gated(act='gelu')", "mlp") == Gated(act="gelu")
    assert fields.part(Attention, "self(scale=none, qk_norm=head)", "attn") == SelfAttention(qk_norm="head")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"whole": "2.5"}, "whole is '2.5': it takes a whole number"),
    ({"whole": True}, "whole is True: it takes a whole number"),
    ({"whole": "inf"}, "whole is 'inf': it takes a whole number"),
    ({"number": "much"}, "number is 'much': it takes a number"),
    ({"yes": "yes"}, "yes is 'yes': it takes true|false"),
    ({"choice": "c"}, "choice is 'c': choose from a, b"),
    ({"pair": [1]}, "pair is [1]: it takes (a whole number, a number)"),
    ({"norm": "rns"}, "norm is 'rns', which is not a known kind of Norm: did you mean rms?"),
    ({"norm": "rms(epz=1)"}, "norm.rms.epz is not a known option: did you mean eps?"),
    ({"norm": ["rms", "rms(eps=x)"]}, "norm[1].rms.eps is 'x': it takes a number"),
    ({"norm": 3}, "norm is 3: choose from "),
    ({"numbr": 1}, "numbr is not a known option: did you mean number?"),
    ({"inner": 3}, "inner is 3"),
    ({"table": 3}, "table is 3: it takes a table of fields"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=str)
def test_refusals_name_the_field_the_value_and_the_choices(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        fields.build(Every, {"whole": 1} | changes)
    assert sentence in str(error.value)


def test_missing_fields_are_named_with_their_meaning() -> None:
    with pytest.raises(UserError, match=r"here.whole is missing: give it a value \(how many\)"):
        fields.build(Every, {}, "here")


def test_every_field_of_the_decoder_is_documented() -> None:
    parts: list[type] = [p for s in (Position, Attention, FeedForward, Norm) for p in s.kinds.values()]
    for cls in [DecoderConfig, *parts]:
        assert fields.hints(cls).keys() <= fields.docs(cls).keys()


def test_configs_are_read_without_torch() -> None:
    code = "import sys, onward.base.fields, onward.config.decoder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_annotations_are_taken_apart_in_one_place() -> None:
    source = Path(fields.__file__).parents[1]
    readers = {path.relative_to(source) for path in source.rglob("*.py") if "get_origin" in path.read_text("utf-8")}
    pydantic = Path("serving/shapes.py")  # types that locate mistakes in requests
    assert readers == {Path("base/arguments.py"), pydantic}
