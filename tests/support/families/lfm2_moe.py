from transformers import Lfm2MoeConfig

from support.families.lfm2 import MIXED
from support.families.qwen2 import DEEP

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
LAYERS = {"layer_types": MIXED[: DEEP["num_hidden_layers"]]}
CASES = {
    "some layers dense": Lfm2MoeConfig(**DEEP, **EXPERTS, **LAYERS, num_dense_layers=1),
    "without a bias, scaled": Lfm2MoeConfig(
        **DEEP, **EXPERTS, **LAYERS, num_dense_layers=0, use_expert_bias=False, routed_scaling_factor=1.5
    ),
}
