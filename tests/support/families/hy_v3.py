from transformers import HYV3Config

from support.families.llama import SIZES

DEEP = {**SIZES, "num_hidden_layers": 3, "head_dim": 8}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
CASES = {
    "a dense layer first": HYV3Config(**DEEP, **EXPERTS),
    "layers by name, two shared, biases, tied": HYV3Config(
        **{**DEEP, "num_key_value_heads": 1},
        **EXPERTS,
        mlp_layer_types=["sparse", "dense", "sparse"],
        num_shared_experts=2,
        router_scaling_factor=0.7,
        attention_bias=True,
        enable_moe_fp32_combine=False,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
}
