from transformers import Mamba2Config

SIZES = {"vocab_size": 43, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "state_size": 5}
CASES = {
    "groups": Mamba2Config(**SIZES, n_groups=3, chunk_size=8),
    "biases, tied": Mamba2Config(
        **SIZES, n_groups=1, use_bias=True, use_conv_bias=False, conv_kernel=3, tie_word_embeddings=True
    ),
}
