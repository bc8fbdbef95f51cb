from transformers import Dots1Config

from support.families.deepseek_v2 import GROUPS
from support.families.qwen2 import DEEP

EXPERTS = {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
CASES = {
    "a dense layer first, windows in later layers": Dots1Config(
        **DEEP, **EXPERTS, first_k_dense_replace=1, sliding_window=5, max_window_layers=2
    ),
    "groups, scaled, biases, tied, no windows": Dots1Config(
        **{**DEEP, "num_key_value_heads": None},
        **EXPERTS,
        **GROUPS,
        head_dim=10,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        sliding_window=None,
        attention_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
    ),
}
