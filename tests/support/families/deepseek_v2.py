from transformers import DeepseekV2Config

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 16,
}
GROUPS = {"n_group": 4, "topk_group": 2}


def yarn(**parameters: object) -> dict[str, object]:
    shared = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 4}
    return {"rope_parameters": {**shared, **parameters}}


CASES = {
    "greedy, experts in every layer": DeepseekV2Config(**SIZES),
    "groups, a dense layer first, queries from x": DeepseekV2Config(
        **{**SIZES, "q_lora_rank": None},
        **GROUPS,
        topk_method="group_limited_greedy",
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        rms_norm_eps=0.01,
    ),
    "scores sharpened, biases, tied, wide latents": DeepseekV2Config(
        **{**SIZES, "kv_lora_rank": 40},
        **yarn(mscale=0.707, mscale_all_dim=0.9),
        attention_bias=True,
        tie_word_embeddings=True,
        n_shared_experts=1,
        hidden_act="gelu_pytorch_tanh",
    ),
    "scores sharpened, turns not": DeepseekV2Config(**SIZES, **yarn(mscale_all_dim=0.5), first_k_dense_replace=2),
    "no experts": DeepseekV2Config(**SIZES, first_k_dense_replace=3),
}
