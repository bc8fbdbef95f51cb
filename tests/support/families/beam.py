from transformers import BeamConfig

from support.families.qwen2 import DEEP

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
    "head_dim": 8,
    "sliding_window": 5,
}
CASES = {
    "windows with positions": BeamConfig(
        **DEEP, **EXPERTS, layer_types=["sliding_attention", "full_attention"] * 2, attention_bias=True
    ),
    "all layers rotated, no cap, weights as they are": BeamConfig(
        **DEEP,
        **EXPERTS,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        },
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        norm_topk_prob=False,
        final_logit_softcapping=None,
        tie_word_embeddings=True,
    ),
}
