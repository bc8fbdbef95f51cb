from transformers import Kolibri1Config

from support.families.qwen2 import DEEP

SIZES = {key: value for key, value in DEEP.items() if key != "intermediate_size"}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 8, "sliding_window": 5}
CASES = {
    "every fifth layer full": Kolibri1Config(**{**SIZES, "num_hidden_layers": 5}, **EXPERTS),
    "weights sum to 1, tied": Kolibri1Config(
        **SIZES,
        **EXPERTS,
        norm_topk_prob=True,
        shared_expert_intermediate_size=10,
        layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=True,
    ),
}
