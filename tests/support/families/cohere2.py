from transformers import Cohere2Config

from support.families.qwen2 import DEEP

FULL, LOCAL = "full_attention", "sliding_attention"
CASES = {
    "one layer in four sees all, without positions": Cohere2Config(**DEEP, sliding_window=5, logit_scale=0.8),
    "biases, untied, other layers": Cohere2Config(
        **{**DEEP, "num_key_value_heads": None},
        sliding_window=3,
        layer_types=[FULL, LOCAL, FULL, LOCAL],
        attention_bias=True,
        tie_word_embeddings=False,
        layer_norm_eps=0.01,
        hidden_act="gelu",
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
    "no windows": Cohere2Config(**{**DEEP, "num_key_value_heads": 1}, layer_types=[FULL] * 4),
    "windows everywhere": Cohere2Config(**DEEP, sliding_window=5, layer_types=[LOCAL] * 4),
}
