from transformers import HunYuanDenseV1Config

from support.families.llama import SIZES

CASES = {
    "grouped": HunYuanDenseV1Config(**SIZES, head_dim=6),
    "a larger theta, wide heads, biases, tied": HunYuanDenseV1Config(
        **{**SIZES, "num_key_value_heads": 1},
        head_dim=10,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 50.0, "factor": 1.0},
    ),
}
