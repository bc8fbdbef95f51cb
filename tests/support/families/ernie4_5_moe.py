from transformers import Ernie4_5_MoeConfig

from support.families.qwen2 import DEEP

EXPERTS = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 12}
CASES = {
    "grouped": Ernie4_5_MoeConfig(**DEEP, **EXPERTS),
    "every second of the first layers, none shared, a least sum, untied": Ernie4_5_MoeConfig(
        **DEEP,
        **EXPERTS,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_end_index=3,
        moe_layer_interval=2,
        moe_norm_min=0.9,
        tie_word_embeddings=False,
    ),
}
