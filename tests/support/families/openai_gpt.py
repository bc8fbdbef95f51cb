from transformers import OpenAIGPTConfig

SIZES = {"vocab_size": 31, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 16}
CASES = {
    "as it was": OpenAIGPTConfig(**SIZES),
    "untied, relu": OpenAIGPTConfig(**SIZES, afn="relu", tie_word_embeddings=False, layer_norm_epsilon=0.01),
    "swish": OpenAIGPTConfig(**SIZES, afn="swish"),
}
