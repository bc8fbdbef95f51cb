from transformers import GPTNeoXConfig

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
}
CASES = {
    "a quarter turns": GPTNeoXConfig(**SIZES),
    "sequential, tied, no attention biases": GPTNeoXConfig(
        **SIZES,
        use_parallel_residual=False,
        attention_bias=False,
        tie_word_embeddings=True,
        hidden_act="gelu_fast",
        layer_norm_eps=0.01,
    ),
    "whole heads turn far": GPTNeoXConfig(**SIZES, rotary_pct=1.0, rotary_emb_base=300.0, hidden_act="relu"),
    "half turns, scaled": GPTNeoXConfig(
        **{**SIZES, "max_position_embeddings": 8},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 300.0, "factor": 4.0, "partial_rotary_factor": 0.5},
    ),
}
