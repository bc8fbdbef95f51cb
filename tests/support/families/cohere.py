from transformers import CohereConfig

from support.families.llama import SIZES

CASES = {
    "grouped": CohereConfig(**SIZES, logit_scale=0.8),
    "normed heads, wide": CohereConfig(**SIZES, head_dim=10, use_qk_norm=True),
    "normed single key/value head, biases, untied": CohereConfig(
        **{**SIZES, "num_key_value_heads": 1},
        use_qk_norm=True,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "multi-head, biases, gelu": CohereConfig(
        **{**SIZES, "num_key_value_heads": None}, attention_bias=True, hidden_act="gelu"
    ),
}
