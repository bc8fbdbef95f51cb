"""Families that transformers has only as the text decoder of a multimodal model: Onward's logits equal those of the
complete model, and Onward's files have the same tensors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedConfig

from onward.base.files import read_json
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.families import family, keys_of, read

from support.decoders import token_ids
from support.grids import thinned
from support.parity import stir, tensors
from support.ways import WAYS, assert_equals_the_plain_run
from support.wrapped import CASES

every_case = pytest.mark.parametrize("hf", CASES.values(), ids=CASES.keys())


@every_case
@torch.inference_mode()
def test_text_decoder_has_the_logits_and_the_tensors_of_the_whole_model(hf: PreTrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = stir(AutoModelForImageTextToText.from_config(hf))
    theirs.save_pretrained(tmp_path / "whole")
    with pytest.warns(UserWarning, match="Only the text decoder"):
        ours, keys = load_model(tmp_path / "whole")
    tokens = token_ids(ours.config, rows=3, length=16)
    wanted = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), wanted, rtol=0, atol=2e-5 * wanted.abs().max().item())

    save_model(ours, tmp_path / "text", keys)
    assert read_json(tmp_path / "text/config.json")["model_type"] == hf.get_text_config().model_type
    kind = hf.get_text_config().model_type
    fresh = json.loads(json.dumps(keys_of(family(kind), ours.config, {"model_type": kind})))
    assert read(fresh)[1] == load_model(tmp_path / "text")[0].config == ours.config
    text, whole = tensors(tmp_path / "text"), tensors(tmp_path / "whole")
    inside = {re.sub(r"^(model\.)?(language_model\.)?", "", name): tensor for name, tensor in whole.items()}
    assert all(torch.equal(tensor, inside[name.removeprefix("model.")]) for name, tensor in text.items())


@every_case
def test_a_key_that_a_text_config_lacks_means_its_default(hf: PreTrainedConfig) -> None:
    text = hf.get_text_config()
    full, default = text.to_dict(), type(text)().to_dict()
    bare = {k: v for k, v in full.items() if k == "model_type" or k not in default or default[k] != v}
    assert len(bare) < len(full)
    assert read(bare)[1] == read(full)[1]


@pytest.mark.parametrize(("hf", "way"), thinned(CASES, list(WAYS)))
def test_every_way_to_run_a_wrapped_family_gives_the_logits_of_the_plain_run(hf: PreTrainedConfig, way: str) -> None:
    assert_equals_the_plain_run(read(hf.get_text_config().to_dict())[1], way)


OLD: list[dict[str, Any]] = [  # keys as in released files; transformers renames them
    {
        "model_type": "step3p5",
        "num_hidden_layers": 5,
        "num_nextn_predict_layers": 1,
        "num_attention_groups": 4,
        "moe_num_experts": 12,
        "moe_top_k": 3,
        "moe_layers_enum": "1,3,4",
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
        "sliding_window": 5,
        "attention_other_setting": {"num_attention_heads": 96},
        "rope_theta": [5e6, 1e4, 1e4] * 2,
        "partial_rotary_factors": [0.5, 1.0, 1.0] * 2,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 131_072,
        },
        "swiglu_limits": [0.0, 0.0, 0.0, 7.0, 7.0, 0.0],
        "swiglu_limits_shared": [0.0, 0.0, 0.0, 16.0, 16.0, 0.0],
    },
    {"model_type": "step3p5", "rope_theta": 500.0, "moe_layers_enum": [0, 2], "num_hidden_layers": 3},
]


@pytest.mark.parametrize("old", OLD, ids=str)
def test_keys_of_releases_mean_what_transformers_makes_of_them(old: dict[str, Any]) -> None:
    given = json.loads(json.dumps(old))
    new = CONFIG_MAPPING[old["model_type"]](**{k: v for k, v in given.items() if k != "model_type"}).to_dict()
    assert read(old)[1] == read(new)[1]
