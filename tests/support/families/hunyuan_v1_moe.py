from transformers import HunYuanMoEV1Config

from support.families.llama import SIZES

CASES = {
    "a larger theta": HunYuanMoEV1Config(
        **SIZES,
        head_dim=8,
        num_experts=5,
        moe_topk=2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 50.0, "factor": 1.0},
        tie_word_embeddings=True,
    ),
    "other numbers of experts by layer, biases": HunYuanMoEV1Config(
        **SIZES, head_dim=6, num_experts=5, moe_topk=[3, 1], attention_bias=True
    ),
}
