from transformers import GPTNeoXJapaneseConfig

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_multiple_size": 2,
    "max_position_embeddings": 16,
}
CASES = {
    "whole heads turn, tied": GPTNeoXJapaneseConfig(**SIZES),
    "a part of each head turns, untied": GPTNeoXJapaneseConfig(
        **SIZES,
        hidden_act="relu",
        layer_norm_eps=0.01,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0, "partial_rotary_factor": 0.7},
    ),
}
