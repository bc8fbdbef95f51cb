from transformers import MiniCPM3Config

from support.families.phi3 import longrope
from support.families.youtu import TINY

CASES = {
    "scaled, tied": MiniCPM3Config(**TINY, dim_model_base=6),
    "not scaled, queries from x, biases, untied": MiniCPM3Config(
        **{**TINY, "q_lora_rank": None, "v_head_dim": None},
        scale_emb=1,
        scale_depth=None,
        dim_model_base=None,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        hidden_act="gelu",
        rms_norm_eps=0.01,
    ),
    "longrope, long": MiniCPM3Config(
        **{**TINY, "max_position_embeddings": 64}, **longrope(original_max_position_embeddings=8)
    ),
}
