from transformers import CodeGenConfig

SIZES = {"vocab_size": 31, "n_positions": 16, "n_ctx": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
CASES = {
    "half turns": CodeGenConfig(**SIZES, rotary_dim=4),
    "whole turns, two heads in a shard, inner width": CodeGenConfig(
        **{**SIZES, "n_head": 8}, rotary_dim=4, n_inner=40, activation_function="relu", layer_norm_epsilon=0.01
    ),
}
