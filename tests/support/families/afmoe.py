from transformers import AfmoeConfig

from support.families.qwen2 import DEEP

EXPERTS = {"moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3}
CASES = {
    "scaled embeddings": AfmoeConfig(**DEEP, **EXPERTS, head_dim=6, sliding_window=5, mup_enabled=True),
    "other layers, dense ones, scaled experts, biases, tied": AfmoeConfig(
        **DEEP,
        **EXPERTS,
        head_dim=10,
        sliding_window=3,
        layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        num_dense_layers=2,
        num_shared_experts=1,
        route_scale=2.5,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
}
