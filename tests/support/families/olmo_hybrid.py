from typing import Any

from transformers import OlmoHybridConfig

from support.families.qwen2 import DEEP

SIZES: dict[str, Any] = {**DEEP, "pad_token_id": None, "eos_token_id": None}
# transformers saves the three convolutions in equal parts, which is right only if they have the same width
EQUAL = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 3}
CASES = {
    "rotary, strengths up to two": OlmoHybridConfig(**SIZES, **EQUAL),
    "no positions, layers by type, biases": OlmoHybridConfig(
        **SIZES,
        **EQUAL,
        attention_bias=True,
        linear_allow_neg_eigval=False,
        linear_conv_kernel_dim=3,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
}
