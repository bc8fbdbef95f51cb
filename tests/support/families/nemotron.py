from transformers import NemotronConfig

from support.families.llama import SIZES

CASES = {
    "grouped": NemotronConfig(**SIZES, head_dim=8),
    "biases, whole heads turn, multi-head": NemotronConfig(
        **{**SIZES, "num_key_value_heads": 4},
        attention_bias=True,
        mlp_bias=True,
        norm_eps=0.01,
        hidden_act="silu",
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
    ),
}
