from transformers import Cohere2MoeConfig

from support.families.qwen2 import DEEP

SIZES = {**DEEP, "num_hidden_layers": 5}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 5}
CASES = {
    "softmax": Cohere2MoeConfig(**SIZES, **EXPERTS),
    "mean of sigmoid and shared experts, rotated dense layers": Cohere2MoeConfig(
        **SIZES,
        **EXPERTS,
        num_shared_experts=2,
        expert_selection_fn="sigmoid",
        first_k_dense_replace=2,
        prefix_dense_intermediate_size=20,
        rms_norm_eps=0.01,
        logit_scale=0.5,
        tie_word_embeddings=False,
    ),
    "sum, weights as they are, dense layers in windows": Cohere2MoeConfig(
        **SIZES,
        **EXPERTS,
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        first_k_dense_replace=2,
        prefix_dense_sliding_window_pattern=2,
        attention_bias=True,
        layer_norm_eps=0.01,
    ),
}
