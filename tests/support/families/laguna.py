from transformers import LagunaConfig

from support.families.qwen2 import DEEP

EXPERTS = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
CASES = {
    "one kind of layers": LagunaConfig(**DEEP, **EXPERTS, head_dim=8),
    "heads and turns by layer, capped routing, a gate per element, biases, tied": LagunaConfig(
        **DEEP,
        **EXPERTS,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        sliding_window=5,
        num_attention_heads_per_layer=[6, 4, 6, 6],
        mlp_layer_types=["sparse", "dense", "sparse", "dense"],
        gating="per-element",
        moe_routed_scaling_factor=2.5,
        moe_router_logit_softcapping=2.0,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
    ),
}
