"""A refusal of a config.json names the file, the keys and values, and either the allowed values or the mistake."""

from typing import Any

import pytest

from onward import UserError
from onward.families import read

SIZES = {"vocab_size": 13, "d_model": 16, "n_layers": 2, "n_heads": 4}
MOE = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama", "hidden_size": -1}, "hidden_size -1: it must be a whole number from 1 to 2147483647"),
    ({"model_type": "llama", "rms_norm_eps": "small"}, "rms_norm_eps 'small': it must be a number from 1e-30 to 1"),
    ({"model_type": "llama", "attention_bias": "yes"}, "attention_bias 'yes': attention.self.bias is 'yes'"),
    ({"model_type": "llama", "rope_parameters": {"rope_theta": 0.0}}, "rope_parameters.rope_theta 0.0: it must be"),
    ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": []}}, "rope_scaling.factor []: it must be"),
    ({"model_type": "gpt2", "n_embd": 30, "n_head": 4}, "n_embd 30 and n_head 4: d_model 30 is not divisible"),
    ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling 0: "),
    ({"model_type": "gemma2", "query_pre_attn_scalar": -1}, "query_pre_attn_scalar -1: attention.self.scale is"),
    ({"model_type": "gptj", "rotary": False}, "rotary False: Onward supports only True"),
    ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv 8.0: Onward supports only None"),
    ({"model_type": "hy_v3", "mlp_bias": True}, "mlp_bias True: Onward supports only False"),
    ({"model_type": "minimax_m2", "scoring_func": "softmax"}, "scoring_func 'softmax': Onward supports only 'sigmoid'"),
    ({"model_type": "minimax_m2", "shared_intermediate_size": 8}, "shared_intermediate_size 8: Onward supports only 0"),
    ({"model_type": "cohere2", "rotary_pct": 0.5}, "rotary_pct 0.5: Onward supports only 1.0"),
    ({"model_type": "cohere_compass_text"}, "has no rope_parameters.full_attention: give a table, or null"),
    (
        {"model_type": "olmo3", "rope_parameters": {"rope_theta": 3.0}},
        "rope_parameters.rope_theta: give a table",
    ),
    (
        {"model_type": "dbrx", "ffn_config": {"moe_normalize_expert_weights": 2}},
        "moe_normalize_expert_weights 2: ",
    ),
    ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}, "mlp_layer_types ['dense']: Onward reads"),
    ({"model_type": "dots1", **MOE, "scoring_func": "softmax"}, "scoring_func 'softmax': Onward supports only"),
    ({"model_type": "iquestcoder", "use_sliding_window": True}, "use_sliding_window True: Onward supports only False"),
    ({"model_type": "onward", "decoder": {**SIZES, "vocab_size": 0}}, ": decoder.vocab_size is 0"),
]


@pytest.mark.parametrize(("hf", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused_config_names_file_key_and_value(hf: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        read(hf, "models/a/config.json")
    assert str(error.value).startswith("models/a/config.json")
    assert sentence in str(error.value)


def test_all_keys_of_a_contradiction_are_named() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
    with pytest.raises(UserError) as error:
        read({"model_type": "llama", "rope_scaling": scaling})
    assert "rope_scaling.low_freq_factor 4.0 and rope_scaling.high_freq_factor 1.0" in str(error.value)
