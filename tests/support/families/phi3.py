from transformers import Phi3Config

from support.families.llama import SIZES

TINY = {**SIZES, "pad_token_id": 0}


def longrope(**changes: object) -> dict[str, object]:
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    return {"rope_parameters": {"rope_type": "longrope", "rope_theta": 300.0, **factors, **changes}}


CASES = {
    "grouped": Phi3Config(**TINY),
    "window, multi-head, tied": Phi3Config(
        **{**TINY, "num_key_value_heads": None}, sliding_window=5, tie_word_embeddings=True, rms_norm_eps=0.01
    ),
    "longrope, long, half turns": Phi3Config(
        **{**TINY, "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64},
        original_max_position_embeddings=8,
        partial_rotary_factor=0.5,
        **longrope(),
    ),
    "longrope, short, window": Phi3Config(
        **{**TINY, "num_attention_heads": 6, "max_position_embeddings": 64},
        original_max_position_embeddings=16,
        sliding_window=5,
        hidden_act="gelu",
        **longrope(attention_factor=1.3),
    ),
}
