"""Odd values of rotary positions in a config.json mean what they mean to transformers."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from onward.base.files import read_json, write_json
from onward.checkpoint.load import load_model

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
