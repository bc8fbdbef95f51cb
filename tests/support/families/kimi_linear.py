from transformers import KimiLinearConfig

from support.families.qwen2 import DEEP

SIZES = {**DEEP, "num_key_value_heads": DEEP["num_attention_heads"], "pad_token_id": None}
LATENTS = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
DELTA = {"linear_num_heads": 3, "linear_head_dim": 8}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1}
CASES = {
    "experts": KimiLinearConfig(
        **SIZES,
        **LATENTS,
        **DELTA,
        **EXPERTS,
        layer_types=[*["linear_attention"] * 2, *["full_attention"] * 2],
        mlp_layer_types=["sparse"] * 4,  # transformers saves dense layers under other names than the published ones
    ),
    "latent queries": KimiLinearConfig(
        **SIZES,
        **LATENTS,
        **DELTA,
        **EXPERTS,
        q_lora_rank=8,
        layer_types=["full_attention", *["linear_attention"] * 3],
        mlp_layer_types=["sparse"] * 4,
        linear_conv_kernel_dim=3,
    ),
}
