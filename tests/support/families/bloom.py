from transformers import BloomConfig

SIZES = {"vocab_size": 31, "hidden_size": 24, "n_layer": 3, "n_head": 4}
CASES = {
    "4 heads": BloomConfig(**SIZES),
    "6 heads, untied": BloomConfig(**{**SIZES, "n_head": 6}, tie_word_embeddings=False, layer_norm_epsilon=0.01),
}
