from transformers import GraniteMoeHybridConfig

from support.families.qwen2 import DEEP

LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 5, "mamba_chunk_size": 8}
SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0}
CASES = {
    "experts": GraniteMoeHybridConfig(
        **DEEP, **MAMBA, **SCALES, layer_types=LAYERS, num_local_experts=4, shared_intermediate_size=20
    ),
    "rotary, dense, groups": GraniteMoeHybridConfig(
        **DEEP,
        **MAMBA,
        layer_types=LAYERS,
        position_embedding_type="rope",
        num_local_experts=0,
        shared_intermediate_size=20,
        mamba_n_groups=2,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
    ),
}
