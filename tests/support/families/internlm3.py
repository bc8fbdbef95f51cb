from transformers import InternLM3Config

from support.families.llama import SIZES, scaled

CASES = {
    "grouped, wide heads": InternLM3Config(**SIZES, head_dim=10),
    "biases, tied, dynamic": InternLM3Config(
        **{**SIZES, "num_key_value_heads": None, "max_position_embeddings": 8},
        **scaled(rope_type="dynamic"),
        head_dim=None,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,
    ),
}
