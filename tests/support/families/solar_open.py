from transformers import SolarOpenConfig

from support.families.deepseek_v2 import GROUPS
from support.families.llama import SIZES, scaled

EXPERTS = {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "head_dim": 6}
TINY = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
CASES = {
    "sparse throughout": SolarOpenConfig(**TINY, **EXPERTS),
    "groups, two shared, biases, tied, yarn": SolarOpenConfig(
        **{**TINY, "num_key_value_heads": 1},
        **EXPERTS,
        **GROUPS,
        **scaled(rope_type="yarn", original_max_position_embeddings=4),
        n_shared_experts=2,
        norm_topk_prob=False,
        routed_scaling_factor=0.7,
        attention_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
    ),
}
