from transformers import GraniteMoeSWAConfig, GraniteSWAConfig

from support.families.granitemoe import EXPERTS, SCALES
from support.families.qwen2 import DEEP

FULL, LOCAL = "full_attention", "sliding_attention"
CASES = {
    "windows, no positions where all is seen": GraniteSWAConfig(
        **DEEP, **SCALES, sliding_window=5, layer_rope_theta=[0, 300.0, 300.0, 100.0]
    ),
    "windows by layer, biases, untied": GraniteSWAConfig(
        **{**DEEP, "num_key_value_heads": 1},
        sliding_window=3,
        layer_types=[LOCAL, FULL, FULL, LOCAL],
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 200.0},
    ),
    "experts": GraniteMoeSWAConfig(**DEEP, **EXPERTS, **SCALES, sliding_window=5, shared_intermediate_size=20),
    "experts, none shared, no windows, no positions": GraniteMoeSWAConfig(
        **DEEP, **EXPERTS, layer_types=[FULL] * 4, layer_rope_theta=[0] * 4, tie_word_embeddings=True
    ),
}
