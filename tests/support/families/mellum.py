from transformers import MellumConfig

from support.families.qwen2 import DEEP

FULL, LOCAL = "full_attention", "sliding_attention"
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 8}
CASES = {
    "windows by layer": MellumConfig(**DEEP, **EXPERTS, sliding_window=5, layer_types=[LOCAL, LOCAL, LOCAL, FULL]),
    "yarn where all is seen, a dense layer, shares as they are, biases, tied": MellumConfig(
        **{**DEEP, "num_key_value_heads": 1},
        **EXPERTS,
        sliding_window=3,
        layer_types=[FULL, LOCAL, FULL, LOCAL],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={
            FULL: {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 8},
            LOCAL: {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "no windows": MellumConfig(**DEEP, **EXPERTS),
}
