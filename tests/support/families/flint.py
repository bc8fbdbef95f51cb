from transformers import FlintConfig

from support.families.qwen2 import DEEP

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 8, "sliding_window": 5}
CASES = {
    "windows between": FlintConfig(**{**DEEP, "num_hidden_layers": 5}, **EXPERTS),
    "weights as they are, dense between, biases, tied": FlintConfig(
        **DEEP,
        **EXPERTS,
        norm_topk_prob=False,
        mlp_only_layers=[2],
        layer_types=["sliding_attention", "full_attention"] * 2,
        shared_expert_intermediate_size=10,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
}
