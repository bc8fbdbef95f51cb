from typing import Any

from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

from support.families.llama import SIZES
from support.families.ministral3 import scaled

known: Any = AutoModelForCausalLM._model_mapping
known._extra_content[Mistral4Config] = Mistral4ForCausalLM  # transformers maps it only as a part of mistral3
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
MANY = {**SIZES, "num_key_value_heads": 4}
CASES = {
    "yarn with mscale": Mistral4Config(
        **MANY, **LATENT, **scaled(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0)
    ),
    "groups, first layer dense, halves, tied": Mistral4Config(
        **MANY,
        **{**LATENT, "q_lora_rank": None},
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=2.0,
        n_shared_experts=2,
        first_k_dense_replace=1,
        rope_interleave=False,
        tie_word_embeddings=True,
        **scaled(rope_type="linear", factor=4.0, original_max_position_embeddings=3),
    ),
}
