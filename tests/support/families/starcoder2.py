from transformers import Starcoder2Config

from support.families.llama import SIZES

CASES = {
    "grouped, windows": Starcoder2Config(**SIZES, sliding_window=5),
    "wide heads, no biases, untied, gelu": Starcoder2Config(
        **{**SIZES, "num_key_value_heads": 1},
        head_dim=10,
        use_bias=False,
        tie_word_embeddings=False,
        hidden_act="gelu",
        norm_epsilon=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
}
