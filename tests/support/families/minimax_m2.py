from transformers import MiniMaxM2Config

from support.families.llama import SIZES, scaled

EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3}
CASES = {
    "half turns": MiniMaxM2Config(**SIZES, **EXPERTS, head_dim=8, rotary_dim=4),
    "whole turns, tied, multi-query": MiniMaxM2Config(
        **{**SIZES, "num_key_value_heads": 1},
        **EXPERTS,
        head_dim=6,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
    ),
    "yarn": MiniMaxM2Config(
        **SIZES, **EXPERTS, head_dim=8, **scaled(rope_type="yarn", original_max_position_embeddings=4)
    ),
}
