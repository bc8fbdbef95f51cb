from transformers import SeedOssConfig

from support.families.llama import SIZES

CASES = {
    "biases of queries, keys and values": SeedOssConfig(**SIZES, head_dim=10),
    "all biases, heads of the width, tied": SeedOssConfig(
        **{**SIZES, "num_key_value_heads": None},
        head_dim=None,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        residual_dropout=0.0,
    ),
    "no biases but the last": SeedOssConfig(
        **SIZES,
        head_dim=6,
        attention_bias=False,
        attention_out_bias=True,
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
}
