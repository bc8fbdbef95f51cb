from transformers import FalconConfig

SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
NEW = {"new_decoder_architecture": True}
CASES = {
    "7b": FalconConfig(**SIZES),
    "40b": FalconConfig(**SIZES, **NEW, num_kv_heads=2),
    "11b": FalconConfig(
        **SIZES,
        **NEW,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "rw": FalconConfig(**SIZES, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "rw, 6 heads, one of keys, narrow": FalconConfig(
        **{**SIZES, "hidden_size": 36, "num_attention_heads": 6},
        alibi=True,
        bias=True,
        ffn_hidden_size=20,
        activation="relu",
        layer_norm_epsilon=0.01,
    ),
    "multi-head, sequential, scaled turns": FalconConfig(
        **SIZES,
        multi_query=False,
        parallel_attn=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    ),
    "new, one of keys": FalconConfig(**SIZES, **NEW, num_kv_heads=1, num_ln_in_parallel_attn=2, bias=True),
}
