from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Alibi, DynamicScaling, LinearScaling, Llama3Scaling, NoPosition, Rotary, UserError, YaRNScaling
from onward.config.decoder import each
from onward.transforms import extended

from support.decoders import DECODERS, assert_close, config, decoder, token_ids


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ("yarn:2", YaRNScaling(factor=2.0, original=12)),
        ("linear:1.5", LinearScaling(factor=1.5)),
        ("dynamic:4", DynamicScaling(factor=4.0, original=12)),
        ("llama3:8", Llama3Scaling(factor=8.0, original=12)),
    ],
)
def test_rope_scales_rotary_positions_and_lengthens_the_context(rope: str, scaling: Any) -> None:
    found = extended(config(position=(Rotary(theta=100), NoPosition())), rope)
    assert each(found.position) == (Rotary(theta=100, scaling=scaling), NoPosition())
    assert found.context_length == int(12 * scaling.factor)


@pytest.mark.parametrize(
    ("rope", "position", "message"),
    [
        ("yarm:2", Rotary(), "'yarm' is not a scaling: did you mean yarn"),
        ("yarn", Rotary(), "as in yarn:2"),
        ("yarn:0.5", Rotary(), "as in yarn:2"),
        ("yarn:nan", Rotary(), "as in yarn:2"),
        ("yarn:2", Alibi(), "no rotary positions"),
        ("yarn:2", Rotary(scaling=LinearScaling(factor=2.0)), "scaled already"),
    ],
)
def test_rope_that_does_not_fit_is_one_sentence(rope: str, position: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        extended(config(position=position), rope)


def test_a_model_is_loaded_with_a_longer_context_and_saved_with_it(tmp_path: Path) -> None:
    model = decoder(DECODERS["llama"])
    onward.save(onward.LanguageModel(model), tmp_path / "short")
    lm = onward.load(tmp_path / "short", rope="linear:2")
    tokens = token_ids(model.config, 1, 24)
    with torch.no_grad():
        logits = lm.model(tokens)
        assert not torch.allclose(logits, model(tokens))
    onward.save(lm, tmp_path / "long")
    again = onward.load(tmp_path / "long")
    assert again.config.context_length == 24
    with torch.no_grad():
        assert_close(again.model(tokens), logits, 1e-6)
