from transformers import PhiConfig

from support.families.llama import SIZES

CASES = {
    "grouped, a third turns": PhiConfig(**SIZES, partial_rotary_factor=0.34),
    "multi-head, normed, tied": PhiConfig(
        **{**SIZES, "num_attention_heads": 3, "num_key_value_heads": None},
        qk_layernorm=True,
        tie_word_embeddings=True,
        layer_norm_eps=0.01,
    ),
    "relu, whole heads turn": PhiConfig(
        **SIZES,
        hidden_act="relu",
        partial_rotary_factor=1.0,
        rope_parameters={"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
    ),
}
