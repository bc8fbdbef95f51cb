from transformers import ArceeConfig

from support.families.llama import SIZES

CASES = {
    "grouped": ArceeConfig(**SIZES),
    "multi-head, biases, tied, yarn": ArceeConfig(
        **{**SIZES, "num_key_value_heads": None},
        head_dim=10,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        hidden_act="silu",
        rms_norm_eps=0.01,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 300.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    ),
}
