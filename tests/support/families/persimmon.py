from transformers import PersimmonConfig

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 16,
}
CASES = {
    "half turns, normed heads": PersimmonConfig(**SIZES),
    "no norms of heads, a quarter turns, tied": PersimmonConfig(
        **SIZES,
        qk_layernorm=False,
        hidden_act="gelu",
        tie_word_embeddings=True,
        layer_norm_eps=0.01,
        rope_parameters={
            "rope_type": "linear",
            "factor": 2.0,
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.25,
        },
    ),
}
