from transformers import ModernBertDecoderConfig

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "local_attention": 10,
    "pad_token_id": 0,
}
CASES = {
    "windows, tied": ModernBertDecoderConfig(**SIZES),
    "all biases, untied, other functions, turns by layer": ModernBertDecoderConfig(
        **SIZES,
        tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        attention_bias=True,
        mlp_bias=True,
        norm_bias=True,
        classifier_bias=True,
        decoder_bias=False,
        norm_eps=0.01,
        hidden_activation="silu",
        classifier_activation="relu",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
}
