"""GPT-3: a GPT-2 with banded attention in every second layer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from onward import DecoderConfig
from onward.config.decoder import at
from onward.families import express
from onward.families.gpt3 import DENSE
from onward.families.gpt3 import PRESETS as RELEASES
from onward.planning.parameters import parameters

PRESETS: dict[str, Any] = RELEASES


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_dense_and_windowed_layers_alternate(config: DecoderConfig) -> None:
    assert [at(config.attention, layer).window for layer in range(config.n_layers)] == [0, 256] * (config.n_layers // 2)
    assert express(config)["model_type"] == "onward"


@pytest.mark.parametrize("name", PRESETS)
def test_without_windows_gpt3_is_a_gpt2_where_heads_fill_the_width(name: str) -> None:
    dense = replace(PRESETS[name], attention=DENSE)
    hf = express(dense)
    assert hf.pop("model_type") == ("onward" if name == "gpt3-13b" else "gpt2")
    if name != "gpt3-13b":
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(GPT2Config(**hf))
        assert sum(p.numel() for p in theirs.parameters()) == parameters(dense) == parameters(PRESETS[name])
