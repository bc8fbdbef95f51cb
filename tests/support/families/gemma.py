from transformers import GemmaConfig

from support.families.llama import SIZES

CASES = {
    "wide heads": GemmaConfig(**SIZES, head_dim=10),
    "single key/value head, biases, untied": GemmaConfig(
        **{**SIZES, "num_key_value_heads": 1},
        head_dim=8,
        attention_bias=True,
        tie_word_embeddings=False,
        rms_norm_eps=0.01,
    ),
    "other gate, scaled turns": GemmaConfig(
        **{**SIZES, "num_key_value_heads": 4},
        head_dim=6,
        hidden_act="silu",
        rope_parameters={"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
    ),
}
