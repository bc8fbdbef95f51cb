from transformers import Glm4MoeLiteConfig

from support.families.deepseek_v2 import GROUPS, SIZES

CASES = {
    "a dense layer first": Glm4MoeLiteConfig(**SIZES),
    "layers by name, groups, in halves, queries from x, biases, tied": Glm4MoeLiteConfig(
        **{**SIZES, "q_lora_rank": None},
        **GROUPS,
        mlp_layer_types=["sparse", "dense", "sparse"],
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=True,
        n_shared_experts=2,
        routed_scaling_factor=0.7,
        norm_topk_prob=False,
        rms_norm_eps=0.01,
    ),
}
