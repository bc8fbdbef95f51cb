from transformers import Qwen2MoeConfig

from support.families.qwen2 import DEEP, SIZES

EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
CASES = {
    "shared expert": Qwen2MoeConfig(**SIZES, **EXPERTS),
    "weights sum to 1, no biases, tied": Qwen2MoeConfig(
        **SIZES, **EXPERTS, norm_topk_prob=True, qkv_bias=False, tie_word_embeddings=True
    ),
    "every other layer sparse, windows": Qwen2MoeConfig(
        **DEEP, **EXPERTS, decoder_sparse_step=2, use_sliding_window=True, sliding_window=5, max_window_layers=3
    ),
    "some layers dense": Qwen2MoeConfig(
        **{**DEEP, "num_key_value_heads": 1}, **EXPERTS, mlp_only_layers=[0, 3], hidden_act="gelu"
    ),
}
