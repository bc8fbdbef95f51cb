from transformers import NemotronHConfig

from support.families.llama import SIZES

MAMBA = {"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 5, "n_groups": 2, "chunk_size": 8}
EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 14,
}
SHAPE = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"} | {"head_dim": 8}
CASES = {
    "all kinds of layers": NemotronHConfig(
        **SHAPE, **MAMBA, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
    ),
    "biases": NemotronHConfig(
        **SHAPE, **MAMBA, layers_block_type=["mlp", "linear_attention", "full_attention"], mlp_bias=True, use_bias=True
    ),
    "experts without a gate": NemotronHConfig(
        **SHAPE,
        **MAMBA,
        **EXPERTS,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"],
        routed_scaling_factor=2.5,
        n_group=2,
        topk_group=1,
    ),
    "experts on latents": NemotronHConfig(
        **SHAPE,
        **MAMBA,
        **EXPERTS,
        layers_block_type=["moe", "linear_attention", "full_attention"],
        moe_latent_size=12,
        norm_topk_prob=False,
    ),
}
