from transformers import ExaoneMoeConfig

from support.families.deepseek_v2 import GROUPS
from support.families.qwen2 import DEEP

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
CASES = {
    "a dense layer first": ExaoneMoeConfig(**DEEP, **EXPERTS, sliding_window=5),
    "layers by name, groups, two shared, tied": ExaoneMoeConfig(
        **{**DEEP, "num_key_value_heads": 1},
        **EXPERTS,
        **GROUPS,
        sliding_window=3,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        layer_types=["full_attention", "sliding_attention"] * 2,
        num_shared_experts=2,
        norm_topk_prob=False,
        routed_scaling_factor=0.7,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,
    ),
}
