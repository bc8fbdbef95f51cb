from transformers import CTRLConfig

SIZES = {"vocab_size": 31, "n_embd": 24, "dff": 40, "n_layer": 2, "n_head": 4, "n_positions": 16}
CASES = {
    "tied": CTRLConfig(**SIZES),
    "untied, a final norm of its own": CTRLConfig(**SIZES, tie_word_embeddings=False, layer_norm_epsilon=0.05),
}
