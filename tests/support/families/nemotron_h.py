from transformers import NemotronHConfig

from support.families.llama import SIZES

MAMBA = {"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 5, "n_groups": 2, "chunk_size": 8}
SHAPE = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"} | {"head_dim": 8}
CASES = {
    "all kinds of layers": NemotronHConfig(
        **SHAPE, **MAMBA, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
    ),
    "biases": NemotronHConfig(
        **SHAPE, **MAMBA, layers_block_type=["mlp", "linear_attention", "full_attention"], mlp_bias=True, use_bias=True
    ),
}
