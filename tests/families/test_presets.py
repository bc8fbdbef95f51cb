"""Presets have exactly as many trainable parameters as the published releases, apart from indexers."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from onward import DecoderConfig
from onward.families import modules, presets
from onward.planning import active_parameters
from onward.planning.parameters import parameters

from support.families import CASES  # noqa: F401 (its files register classes with transformers)

PARAMETERS = {  # from the papers, the model cards or transformers
    "bloom-560m": 559_214_592,
    "bloom": 176_247_271_424,
    "command-r-35b": 34_980_831_232,
    "command-r-plus-104b": 103_810_674_688,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,  # plus 14,848 routing biases, which have no gradient
    "deepseek-v3.2": 671_026_404_352,  # plus 850 M in indexers
    "falcon-7b": 6_921_720_704,
    "falcon-rw-1b": 1_311_625_216,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-1.3b": 1_315_723_264,
    "gpt3-13b": 12_936_488_380,
    "gpt3-175b": 174_604_259_328,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-neox-20b": 20_554_567_680,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mpt-7b": 6_649_286_656,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "palm-8b": 8_632_012_800,
    "palm-62b": 62_495_662_080,
    "palm-540b": 540_356_474_880,
    "phi-1": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "pythia-14m": 14_067_712,
    "pythia-31m": 30_494_720,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "stablelm-3b-4e1t": 2_795_443_200,
    "stablelm-2-1.6b": 1_644_515_328,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "biogpt": 346_763_264,
    "codegen-350m": 356_712_448,
    "command-r7b": 8_028_033_024,
    "dbrx-132b": 131_596_523_520,
    "dots.llm1": 142_774_373_888,  # plus 7,808 routing biases
    "ernie-4.5-0.3b": 360_748_032,
    "exaone-4.0-1.2b": 1_279_391_488,
    "exaone-4.0-32b": 32_003_216_384,
    "glm-4-9b": 9_399_951_360,
    "olmo-3-7b": 7_298_011_136,
    "olmoe-1b-7b": 6_919_161_856,
    "santacoder": 1_124_886_528,
    "seed-oss-36b": 36_151_104_512,
    "starcoder": 15_517_456_384,
    "starcoderbase-1b": 1_137_207_296,
}
ACTIVE = {"mixtral-8x7b": 12_879_925_248}
PUBLISHED = [name for name, preset in presets().items() if not isinstance(preset.published, DecoderConfig)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_the_known_number_of_parameters(name: str) -> None:
    assert parameters(presets()[name].config) == PARAMETERS[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_a_preset_with_experts_has_the_known_number_of_active_parameters(name: str) -> None:
    assert active_parameters(presets()[name].config) == ACTIVE[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_parameters_that_transformers_counts(name: str) -> None:
    preset: Any = presets()[name]
    keys = {"model_type": next(iter(modules()[preset.family].ARCHITECTURES)), **preset.published}
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[keys.pop("model_type")](**keys))
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad and ".indexer." not in name}
    # the parameters of an indexer have no gradient
    assert parameters(preset.config) == sum(p.numel() for p in trained.values())
    assert active_parameters(preset.config) <= parameters(preset.config)


@pytest.mark.parametrize("name", presets())
def test_every_preset_but_the_first_has_ancestors_that_lead_to_it(name: str) -> None:
    chain = [name]
    while ancestor := presets()[chain[-1]].ancestor:
        assert ancestor not in chain
        chain.append(ancestor)
    assert chain[-1] == "gpt"
