"""New weights whose matrices are drawn later, as by several processes together, equal weights drawn at once."""

import pytest
import torch

from onward import Decoder
from onward.parallel.new_weights import new_decoder
from onward.parallel.parts import allocate

from support.decoders import DECODERS
from support.grids import first


@pytest.mark.parametrize("name", first(6, reversed(DECODERS)))
def test_matrices_drawn_later_have_the_same_values(name: str) -> None:
    torch.manual_seed(3)
    whole, following = Decoder(DECODERS[name]), torch.rand(1)
    model, draw = new_decoder(DECODERS[name], 3)
    assert all(parameter.is_meta == (parameter.ndim > 1) for parameter in model.parameters())
    allocate(model, "cpu")
    draw(model)
    assert torch.rand(1) == following
    for (name, one), (other_name, other) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name
