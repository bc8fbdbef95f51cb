from transformers import Glm4Config

from support.families.llama import SIZES

TINY = {**SIZES, "pad_token_id": None, "head_dim": 8}
CASES = {
    "half turns": Glm4Config(**TINY),
    "no biases, a quarter turns, tied": Glm4Config(
        **{**TINY, "num_key_value_heads": 1},
        attention_bias=False,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
    ),
    "whole turns": Glm4Config(
        **TINY,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
    ),
}
