from transformers import GPTJConfig

SIZES = {"vocab_size": 31, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}
CASES = {
    "half turns": GPTJConfig(**SIZES, rotary_dim=4),
    "whole heads turn, tied, narrow, squared relu": GPTJConfig(
        **SIZES,
        rotary_dim=8,
        n_inner=20,
        activation_function="relu2",
        tie_word_embeddings=True,
        layer_norm_epsilon=0.01,
    ),
    "one pair turns, one head": GPTJConfig(**{**SIZES, "n_head": 1}, rotary_dim=2, activation_function="gelu"),
}
