from transformers import DeepseekV3Config

from support.families.deepseek_v2 import GROUPS, SIZES, yarn

CASES = {
    "groups, a dense layer first": DeepseekV3Config(**SIZES, **GROUPS, first_k_dense_replace=1),
    "in halves, shares as they are, queries from x": DeepseekV3Config(
        **{**SIZES, "q_lora_rank": None},
        **GROUPS,
        first_k_dense_replace=0,
        rope_interleave=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        n_shared_experts=2,
    ),
    "one group, scores sharpened, biases, tied": DeepseekV3Config(
        **SIZES,
        **yarn(mscale=1.0, mscale_all_dim=1.0),
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,
        hidden_act="gelu",
    ),
    "heads that do not divide the width": DeepseekV3Config(
        **{**SIZES, "num_attention_heads": 5}, **GROUPS, num_key_value_heads=5, first_k_dense_replace=1
    ),
}
