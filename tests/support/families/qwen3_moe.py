from transformers import Qwen3MoeConfig

from support.families.qwen2 import DEEP, SIZES

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
CASES = {
    "grouped": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=10),
    "weights sum to 1, tied, biases": Qwen3MoeConfig(
        **SIZES, **EXPERTS, norm_topk_prob=True, tie_word_embeddings=True, attention_bias=True
    ),
    "every other layer sparse, window": Qwen3MoeConfig(
        **DEEP, **EXPERTS, decoder_sparse_step=2, use_sliding_window=True, sliding_window=5
    ),
    "some layers dense, experts as wide": Qwen3MoeConfig(
        **DEEP, **{**EXPERTS, "moe_intermediate_size": 40}, mlp_only_layers=[1], hidden_act="gelu"
    ),
}
