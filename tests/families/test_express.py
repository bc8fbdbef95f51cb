"""A decoder is saved in the format of a family only if that family accepts it; an error in the family's file is
raised."""

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from onward import Gated, LayerNorm, Plain, RMSNorm
from onward.families import Inexpressible, families, keys_of, llama, presets, require

from support.decoders import DECODERS, config

PUBLISHED = {name: preset.config for name, preset in islice(presets().items(), 0, None, 7)}


@pytest.mark.parametrize("model_type", families())
def test_a_family_expresses_a_decoder_or_refuses_it(model_type: str) -> None:
    family = families()[model_type]
    for decoder in (DECODERS | PUBLISHED).values():
        hf = keys_of(family, decoder, {})
        assert hf is None or family.config(hf) == decoder


@pytest.mark.parametrize("planted", [AttributeError("c.nrom"), KeyError("eps"), TypeError("no")], ids=repr)
@pytest.mark.parametrize("function", ["to_hf", "config"])
def test_an_error_in_a_family_is_raised(function: str, planted: Exception) -> None:
    def typo(_: Any) -> Any:
        raise planted

    family: Any = SimpleNamespace(**vars(llama) | {function: typo})
    with pytest.raises(type(planted)):
        keys_of(family, config(), {})


def test_a_required_part_is_narrowed_or_refused() -> None:
    assert require(RMSNorm(eps=0.5), RMSNorm).eps == 0.5
    assert require(Plain(act="relu"), Plain, Gated).act == "relu"
    with pytest.raises(Inexpressible, match="RMSNorm is not LayerNorm"):
        require(RMSNorm(), LayerNorm)
    with pytest.raises(Inexpressible, match="tuple is not LayerNorm"):
        require((LayerNorm(), RMSNorm()), LayerNorm)
