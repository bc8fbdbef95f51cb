from transformers import MptConfig

SIZES = {"vocab_size": 31, "d_model": 24, "n_layers": 3, "n_heads": 4, "max_seq_len": 16}
CASES = {
    "7b": MptConfig(**SIZES),
    "6 heads, clipped, untied": MptConfig(
        **{**SIZES, "n_heads": 6},
        attn_config={"clip_qkv": 0.5},
        tie_word_embeddings=False,
        layer_norm_epsilon=0.01,
    ),
    "scaled": MptConfig(**SIZES, attn_config={"softmax_scale": 0.3}),
}
