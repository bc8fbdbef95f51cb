from transformers import GlmConfig

from support.families.llama import SIZES

TINY = {**SIZES, "pad_token_id": None, "head_dim": 8}
CASES = {
    "half turns": GlmConfig(**TINY),
    "no biases, a quarter turns, tied": GlmConfig(
        **{**TINY, "num_key_value_heads": 1},
        attention_bias=False,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
    ),
    "whole turns": GlmConfig(
        **TINY,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
    ),
}
