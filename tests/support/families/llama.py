from transformers import LlamaConfig

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def scaled(**parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": 300.0, "factor": 4.0, **parameters}}


CASES = {
    "grouped": LlamaConfig(**SIZES),
    "multi-query, wide heads": LlamaConfig(**{**SIZES, "num_key_value_heads": 1, "head_dim": 10}),
    "multi-head, tied, biases": LlamaConfig(
        **{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "gelu, far turns": LlamaConfig(
        **SIZES,
        hidden_act="gelu_pytorch_tanh",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "linear": LlamaConfig(**SIZES, **scaled(rope_type="linear")),
    "dynamic": LlamaConfig(**{**SIZES, "max_position_embeddings": 8}, **scaled(rope_type="dynamic")),
    "yarn": LlamaConfig(**SIZES, **scaled(rope_type="yarn", original_max_position_embeddings=4)),
    "yarn, every key": LlamaConfig(
        **SIZES,
        **scaled(
            rope_type="yarn",
            original_max_position_embeddings=8,
            beta_fast=4.0,
            beta_slow=0.5,
            truncate=False,
            mscale=0.7,
            mscale_all_dim=0.4,
        ),
    ),
    "yarn, attention factor": LlamaConfig(
        **SIZES, **scaled(rope_type="yarn", original_max_position_embeddings=8, attention_factor=0.8)
    ),
    "llama3": LlamaConfig(
        **SIZES,
        **scaled(rope_type="llama3", original_max_position_embeddings=8, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "longrope, long": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 300.0,
            "original_max_position_embeddings": 8,
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 5.0],
        },
    ),
    "longrope, short": LlamaConfig(
        **{**SIZES, "max_position_embeddings": 64},
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 300.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 5.0],
            "attention_factor": 1.3,
        },
    ),
}
