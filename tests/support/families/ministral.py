from transformers import MinistralConfig

from support.families.qwen2 import DEEP

FULL, LOCAL = "full_attention", "sliding_attention"
CASES = {
    "windows by layer": MinistralConfig(**DEEP, head_dim=6, sliding_window=5, layer_types=[FULL, LOCAL, LOCAL, LOCAL]),
    "windows everywhere, tied": MinistralConfig(
        **{**DEEP, "num_key_value_heads": 1},
        head_dim=10,
        sliding_window=3,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
    "no windows": MinistralConfig(**DEEP, head_dim=6, layer_types=[FULL] * 4),
}
