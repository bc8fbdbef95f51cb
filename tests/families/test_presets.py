"""Presets are the published releases, to the last parameter."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from onward.families import modules, presets
from onward.model.config import DecoderConfig
from onward.planning.parameters import active_parameters, parameters

PARAMETERS = {  # known from the papers, the model cards or transformers
    "gpt2": 124_439_808,
    "llama-2-7b": 6_738_415_616,
}
PUBLISHED = [name for name, preset in presets().items() if not isinstance(preset.published, DecoderConfig)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_the_known_number_of_parameters(name: str) -> None:
    assert parameters(presets()[name].config) == PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_parameters_that_transformers_counts(name: str) -> None:
    preset = presets()[name]
    model_type = next(iter(modules()[preset.family].ARCHITECTURES))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**preset.published))
    assert parameters(preset.config) == sum(p.numel() for p in theirs.parameters())
    assert active_parameters(preset.config) <= parameters(preset.config)


@pytest.mark.parametrize("name", presets())
def test_every_preset_but_the_first_has_ancestors_that_lead_to_it(name: str) -> None:
    chain = [name]
    while ancestor := presets()[chain[-1]].ancestor:
        assert ancestor not in chain
        chain.append(ancestor)
    assert chain[-1] == "gpt"
