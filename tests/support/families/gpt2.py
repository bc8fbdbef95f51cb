from transformers import GPT2Config

SIZES = {"vocab_size": 31, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}
DEEP = {**SIZES, "n_layer": 3}
CASES = {
    "as it was": GPT2Config(**SIZES),
    "untied, narrow, relu": GPT2Config(
        **SIZES, n_inner=20, activation_function="relu", tie_word_embeddings=False, layer_norm_epsilon=0.01
    ),
    "exact gelu, unscaled scores": GPT2Config(**SIZES, activation_function="gelu", scale_attn_weights=False),
    "scores scaled by layer": GPT2Config(**DEEP, scale_attn_by_inverse_layer_idx=True),
    "scores scaled by layer only": GPT2Config(
        **DEEP, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True
    ),
}
