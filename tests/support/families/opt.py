from transformers import OPTConfig

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "ffn_dim": 40,
    "max_position_embeddings": 16,
}
CASES = {
    "125m": OPTConfig(**SIZES),
    "350m": OPTConfig(**SIZES, word_embed_proj_dim=10, do_layer_norm_before=False),
    "projected, untied, no final norm": OPTConfig(
        **SIZES, word_embed_proj_dim=30, tie_word_embeddings=False, _remove_final_layer_norm=True
    ),
    "no biases, norms without weights, gelu": OPTConfig(
        **SIZES, enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu"
    ),
}
