from transformers import Qwen3Config

from support.families.qwen2 import DEEP, SIZES

CASES = {
    "grouped": Qwen3Config(**SIZES, head_dim=6),
    "tied, biases, odd head": Qwen3Config(**SIZES, head_dim=14, tie_word_embeddings=True, attention_bias=True),
    "windows in later layers": Qwen3Config(
        **DEEP, head_dim=6, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "windows by layer": Qwen3Config(
        **DEEP,
        head_dim=6,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    ),
}
