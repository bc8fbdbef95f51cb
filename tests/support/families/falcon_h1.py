from transformers import FalconH1Config

from support.families.llama import SIZES

MAMBA = {"mamba_n_heads": 6, "mamba_d_ssm": 48, "mamba_d_state": 5, "mamba_chunk_size": 8}
CASES = {
    "norm before the gate, groups": FalconH1Config(**SIZES, **MAMBA, mamba_n_groups=2, mamba_rms_norm=True),
    "factors": FalconH1Config(
        **SIZES,
        **MAMBA,
        embedding_multiplier=5.656854249492381,
        lm_head_multiplier=0.0390625,
        mlp_multipliers=[0.8838834764831844, 0.5859375],
        key_multiplier=0.39,
        attention_in_multiplier=1.25,
        attention_out_multiplier=0.9375,
        ssm_multipliers=[0.35355339059327373, 0.25, 1.3, 0.5, 0.7],
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.23570226039551587,
    ),
    "norm after the gate": FalconH1Config(
        **SIZES, **MAMBA, mamba_n_groups=3, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_conv_bias=False
    ),
}
