from transformers import CwmConfig

from support.families.qwen2 import DEEP

FULL, LOCAL = "full_attention", "sliding_attention"
CASES = {
    "one layer in four sees all": CwmConfig(**DEEP, head_dim=10, sliding_window=5),
    "other layers, biases, tied": CwmConfig(
        **{**DEEP, "num_key_value_heads": 1},
        head_dim=6,
        sliding_window=3,
        layer_types=[LOCAL, FULL, LOCAL, LOCAL],
        mlp_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
    "no windows": CwmConfig(**DEEP, head_dim=6, layer_types=[FULL] * 4),
}
