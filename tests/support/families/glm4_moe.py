from transformers import Glm4MoeConfig

from support.families.deepseek_v2 import GROUPS
from support.families.llama import SIZES

EXPERTS = {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3}
DEEP = {**SIZES, "num_hidden_layers": 3, "head_dim": 8}
CASES = {
    "a dense layer first, biases": Glm4MoeConfig(**DEEP, **EXPERTS, attention_bias=True),
    "normed heads, groups, two shared, scaled, tied": Glm4MoeConfig(
        **DEEP,
        **EXPERTS,
        **GROUPS,
        use_qk_norm=True,
        first_k_dense_replace=0,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
    ),
    "no experts, whole turns, heads of the width, shares as they are": Glm4MoeConfig(
        **{**SIZES, "num_key_value_heads": 1},
        **EXPERTS,
        first_k_dense_replace=2,
        norm_topk_prob=False,
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0, "partial_rotary_factor": 1.0},
    ),
    "shares as they are, gelu": Glm4MoeConfig(
        **DEEP, **EXPERTS, norm_topk_prob=False, hidden_act="gelu", first_k_dense_replace=2
    ),
}
