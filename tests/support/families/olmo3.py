from transformers import Olmo3Config

from support.families.qwen2 import DEEP

FULL, LOCAL = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 8}
CASES = {
    "yarn where all is seen": Olmo3Config(
        **DEEP,
        sliding_window=5,
        rope_parameters={FULL: YARN, LOCAL: {"rope_type": "default", "rope_theta": 300.0}},
    ),
    "multi-head, tied, biases, other windows": Olmo3Config(
        **{**DEEP, "num_key_value_heads": None},
        sliding_window=3,
        layer_types=[FULL, LOCAL, LOCAL, FULL],
        tie_word_embeddings=True,
        attention_bias=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={FULL: None, LOCAL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "yarn in windows": Olmo3Config(
        **DEEP, sliding_window=5, rope_parameters={FULL: {"rope_type": "default", "rope_theta": 100.0}, LOCAL: YARN}
    ),
    "no windows": Olmo3Config(**DEEP, layer_types=[FULL] * 4),
}
