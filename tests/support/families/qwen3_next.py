from transformers import Qwen3NextConfig

from support.families.qwen2 import DEEP
from support.families.qwen3_moe import EXPERTS

DELTA = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
SHARED = {"shared_expert_intermediate_size": 20}
CASES = {
    "experts": Qwen3NextConfig(**DEEP, **DELTA, **EXPERTS, **SHARED),
    "some layers dense, biases, layers by type": Qwen3NextConfig(
        **DEEP,
        **DELTA,
        **EXPERTS,
        **SHARED,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        attention_bias=True,
        linear_conv_kernel_dim=3,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    ),
}
