from transformers import HeliumConfig

from support.families.llama import SIZES

TINY = {**SIZES, "head_dim": 6, "pad_token_id": None}
CASES = {
    "grouped": HeliumConfig(**TINY),
    "biases, tied": HeliumConfig(
        **{**TINY, "num_key_value_heads": 1},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
}
