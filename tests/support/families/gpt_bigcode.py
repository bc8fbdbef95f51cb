from transformers import GPTBigCodeConfig

SIZES = {"vocab_size": 31, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4}
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CASES = {
    "one key/value head": GPTBigCodeConfig(**SIZES),
    "a key/value head for each, untied": GPTBigCodeConfig(
        **SIZES, **PLAIN, multi_query=False, tie_word_embeddings=False, n_inner=40, activation_function="gelu"
    ),
    "scores as they are": GPTBigCodeConfig(**SIZES, **PLAIN, scale_attn_weights=False, layer_norm_epsilon=0.01),
}
