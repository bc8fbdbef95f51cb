"""A config.json in the words of its time means what it means in those of today."""

from typing import Any

import pytest

from onward.families import read

FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LONG = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
LINEAR = {"rope_type": "linear", "factor": 8.0}
OLD_AND_NEW: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gemma", {"hidden_act": "gelu"}, {}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, {}),
    ("gemma", {"hidden_activation": None}, {}),
    (
        "gemma3_text",
        {"rope_theta": 300.0, "rope_local_base_freq": 100.0, "rope_scaling": LINEAR, "sliding_window_pattern": 2},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 300.0, **LINEAR},
                "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
            },
            "layer_types": ["sliding_attention", "full_attention"] * 13,
        },
    ),
    (
        "gpt_neox",
        {"rotary_pct": 0.5, "rotary_emb_base": 300, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 300.0, **LINEAR}},
    ),
    ("gpt_neo", {"attention_layers": ["global", "local"] * 12}, {"attention_types": [[["global", "local"], 12]]}),
    *(
        (
            "phi3",
            {**LONG, "rope_scaling": {"type": word, **FACTORS}},
            {**LONG, "rope_parameters": {"rope_type": "longrope", **FACTORS}},
        )
        for word in ("su", "yarn", "longrope")
    ),
]


@pytest.mark.parametrize(("model_type", "old", "new"), OLD_AND_NEW, ids=str)
def test_old_keys_mean_what_the_new_ones_do(model_type: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read({"model_type": model_type, **old})[1] == read({"model_type": model_type, **new})[1]
