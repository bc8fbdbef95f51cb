from transformers import MistralConfig

from support.families.llama import SIZES

CASES = {
    "window, grouped": MistralConfig(**SIZES, sliding_window=5),
    "no window, wide heads": MistralConfig(**SIZES, sliding_window=None, head_dim=10),
    "width no multiple of the heads": MistralConfig(**{**SIZES, "hidden_size": 26}, head_dim=6, sliding_window=None),
    "multi-query, tied, far turns": MistralConfig(
        **{**SIZES, "num_key_value_heads": 1},
        sliding_window=1,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,
        hidden_act="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
}
