from transformers import CohereCompassTextConfig

from support.families.qwen2 import DEEP

FULL, LOCAL = "full_attention", "sliding_attention"
TURNS = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [1, 1, 1]}
CASES = {
    "positions in windows only": CohereCompassTextConfig(
        **DEEP, sliding_window=5, layer_types=[LOCAL, FULL] * 2, rope_parameters={FULL: None, LOCAL: TURNS}
    ),
    "positions everywhere, scaled logits, biases, untied": CohereCompassTextConfig(
        **{**DEEP, "num_key_value_heads": 1},
        sliding_window=3,
        layer_types=[FULL, LOCAL, LOCAL, FULL],
        rope_parameters={FULL: {**TURNS, "rope_theta": 100.0}, LOCAL: TURNS},
        logit_scale=0.4,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_norm_eps=0.01,
    ),
    "no windows": CohereCompassTextConfig(**DEEP, rope_parameters={FULL: TURNS}),
}
