"""A config.json with old keys describes the same decoder as one with current keys."""

from typing import Any

import pytest

from onward.families import read

FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LONG = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
FULL, LOCAL = "full_attention", "sliding_attention"
MOE = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
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
                FULL: {"rope_theta": 300.0, **LINEAR},
                LOCAL: {"rope_theta": 100.0, "rope_type": "default"},
            },
            "layer_types": [LOCAL, FULL] * 13,
        },
    ),
    (
        "gpt_neox",
        {"rotary_pct": 0.5, "rotary_emb_base": 300, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 300.0, **LINEAR}},
    ),
    ("gpt_neo", {"attention_layers": ["global", "local"] * 12}, {"attention_types": [[["global", "local"], 12]]}),
    ("cohere2", {"layer_switch": 2, "rotary_pct": 1.0}, {"layer_types": [LOCAL, FULL] * 20}),
    ("cohere2", {"sliding_window_pattern": 2}, {"layer_types": [LOCAL, FULL] * 20}),
    (
        "cwm",
        {"rope_theta": 300.0, "rope_scaling": LINEAR},
        {"rope_parameters": {"rope_theta": 300.0, **LINEAR}},
    ),
    (
        "dbrx",
        {"attn_config": {"rope_theta": 300.0}},
        {"rope_parameters": {"rope_theta": 300.0, "rope_type": "default"}},
    ),
    (
        "dots1",
        {**MOE, "scoring_func": "noaux_tc", "moe_layer_freq": 1},
        {**MOE, "sliding_window": 4096},
    ),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, {"layer_types": [LOCAL, LOCAL, LOCAL, FULL] * 8}),
    (
        "exaone4",
        {"sliding_window_pattern": "LG", "num_hidden_layers": 3},
        {"layer_types": [LOCAL, FULL, FULL], "num_hidden_layers": 3},
    ),
    ("glm4_moe_lite", {"first_k_dense_replace": 2}, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 45}),
    ("hy_v3", {"num_local_experts": 64}, {"num_experts": 64}),
    ("internlm3", {"qkv_bias": True, "bias": True}, {"attention_bias": True, "mlp_bias": True}),
    ("minimax_m2", {"rotary_dim": 64}, {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5e6}}),
    (
        "olmo3",
        {"rope_theta": 300.0, "rope_scaling": LINEAR},
        {"rope_parameters": {FULL: {"rope_theta": 300.0, **LINEAR}, LOCAL: {"rope_theta": 500_000.0}}},
    ),
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
