from transformers import AriaTextConfig

from support.families.llama import SIZES

EXPERTS = {"moe_num_experts": 6, "moe_topk": 3}
CASES = {
    "two shared": AriaTextConfig(**SIZES, **EXPERTS),
    "one shared, biases, tied": AriaTextConfig(
        **{**SIZES, "num_key_value_heads": None},
        **EXPERTS,
        head_dim=10,
        moe_num_shared_experts=1,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
}
