from transformers import BitNetConfig

from support.families.llama import SIZES

CASES = {
    "grouped": BitNetConfig(**SIZES),
    "biases, tied": BitNetConfig(
        **{**SIZES, "num_key_value_heads": 4},
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,
        hidden_act="silu",
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
}
