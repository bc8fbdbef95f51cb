from transformers import Qwen2Config

from support.families.llama import SIZES

DEEP = {**SIZES, "num_hidden_layers": 4}
CASES = {
    "grouped": Qwen2Config(**SIZES),
    "multi-query, tied": Qwen2Config(**{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "windows in later layers": Qwen2Config(**DEEP, use_sliding_window=True, sliding_window=5, max_window_layers=3),
    "windows by layer": Qwen2Config(
        **DEEP,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "windows in every layer": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=0),
    "a window that is not used": Qwen2Config(**SIZES, sliding_window=5, max_window_layers=0),
}
