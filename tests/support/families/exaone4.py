from transformers import Exaone4Config

from support.families.qwen2 import DEEP

FULL, LOCAL = "full_attention", "sliding_attention"
CASES = {
    "positions in windows only": Exaone4Config(**DEEP, sliding_window=5),
    "no windows, positions everywhere, tied": Exaone4Config(
        **{**DEEP, "num_key_value_heads": 1}, sliding_window=None, layer_types=[FULL] * 4, tie_word_embeddings=True
    ),
    "windows by layer, wide heads": Exaone4Config(
        **DEEP,
        head_dim=10,
        sliding_window=3,
        layer_types=[FULL, LOCAL, LOCAL, FULL],
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
    "no positions, by a window that no layer has": Exaone4Config(**DEEP, sliding_window=7, layer_types=[FULL] * 4),
    "a pattern of letters beside the layers": Exaone4Config(
        **DEEP, sliding_window=5, sliding_window_pattern="LLLG", layer_types=[LOCAL, LOCAL, LOCAL, FULL]
    ),
}
