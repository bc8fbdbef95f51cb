"""Unusual values of rotary positions in a config.json have the meaning that transformers gives them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from onward import DynamicScaling, LinearScaling, Llama3Scaling, Rotary, Scaling, YaRNScaling
from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.families import read

from support.decoders import decoder
from support.families import CASES
from support.parity import assert_same_logits, publish

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, "factor": 0.0}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
CARDS = "llama", "gemma3_text", "qwen2_moe"


@pytest.mark.parametrize(
    "case",
    ["gpt_oss: {}", "llama: longrope with factor 0", *(f"{family}: rope_scaling of a model card" for family in CARDS)],
)
@pytest.mark.filterwarnings("ignore:config.json has a rope_scaling")
def test_odd_rotary_parameters_agree_with_transformers(case: str, tmp_path: Path) -> None:
    family = case.split(":")[0]
    publish(next(hf for name, hf in CASES.items() if name.startswith(f"{family}:")), tmp_path)
    published = read_json(tmp_path / "config.json")
    parameters: dict[str, Any] = {}
    if "card" in case:
        parameters, published["rope_scaling"] = published["rope_parameters"], YARN
    elif family == "llama":
        pairs = published["head_dim"] // 2
        parameters = LONGROPE | {"short_factor": [1.5] * pairs, "long_factor": [2.0] * pairs}
    write_json(tmp_path / "config.json", published | {"rope_parameters": parameters})
    theirs = publish(AutoConfig.from_pretrained(tmp_path), tmp_path / "theirs")
    write_json(tmp_path / "theirs" / "config.json", read_json(tmp_path / "config.json"))
    assert_same_logits(load_model(tmp_path / "theirs")[0], theirs)


SCALINGS = (
    LinearScaling(4.0),
    DynamicScaling(4.0, 16),
    Llama3Scaling(4.0, 1.0, 4.0, 8),
    YaRNScaling(4.0, 8, attention_factor=1.3),
)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.kind)
def test_any_scaling_of_phimoe_is_saved_as_transformers_reads_it(scaling: Scaling, tmp_path: Path) -> None:
    config = read(CASES["phimoe: grouped"].to_dict())[1]
    model = decoder(replace(config, context_length=16, position=Rotary(theta=300.0, scaling=scaling)))
    save_model(model, tmp_path)
    assert read_json(tmp_path / "config.json")["model_type"] == "phimoe"
    assert_same_logits(model, AutoModelForCausalLM.from_pretrained(tmp_path))
