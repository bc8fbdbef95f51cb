from transformers import BambaConfig

from support.families.granitemoehybrid import MAMBA
from support.families.qwen2 import DEEP

EVEN = {**DEEP, "hidden_size": 32}  # half of a head is rotated

CASES = {
    "one layer of attention": BambaConfig(**EVEN, **MAMBA, attn_layer_indices=[1]),
    "groups, biases": BambaConfig(
        **EVEN, **MAMBA, attn_layer_indices=[0, 3], mamba_n_groups=4, mamba_proj_bias=True, attention_bias=True
    ),
}
