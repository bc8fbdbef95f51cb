from transformers import MiMoV2FlashConfig

from support.families.llama import SIZES

DEEP = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 1}
EXPERTS = {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3}
TURNS = {"rope_type": "default", "partial_rotary_factor": 0.34}
CASES = {
    "as released": MiMoV2FlashConfig(**DEEP, **EXPERTS, head_dim=12, v_head_dim=6, sliding_window=5),
    "other layers, values as wide as keys, groups, biases, tied": MiMoV2FlashConfig(
        **{**DEEP, "num_key_value_heads": 2},
        **EXPERTS,
        head_dim=12,
        v_head_dim=12,
        attention_value_scale=1.0,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=2.0,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {**TURNS, "rope_theta": 300.0},
            "sliding_attention": {**TURNS, "rope_theta": 100.0},
        },
    ),
}
