from transformers import XGLMConfig

SIZES = {
    "vocab_size": 31,
    "d_model": 24,
    "ffn_dim": 40,
    "num_layers": 2,
    "attention_heads": 4,
    "max_position_embeddings": 16,
}
CASES = {
    "tied": XGLMConfig(**SIZES),
    "untied, embeddings as they are, relu": XGLMConfig(
        **SIZES, tie_word_embeddings=False, scale_embedding=False, activation_function="relu"
    ),
}
