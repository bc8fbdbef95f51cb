from transformers import GPTNeoConfig

SIZES = {"vocab_size": 31, "hidden_size": 24, "num_heads": 3, "max_position_embeddings": 16}
CASES = {
    "alternating": GPTNeoConfig(**SIZES, num_layers=4, attention_types=[[["global", "local"], 2]], window_size=5),
    "untied, narrow, relu": GPTNeoConfig(
        **SIZES,
        num_layers=3,
        attention_types=[[["local"], 2], [["global"], 1]],
        window_size=1,
        intermediate_size=20,
        activation_function="relu",
        tie_word_embeddings=False,
        layer_norm_epsilon=0.01,
    ),
    "global": GPTNeoConfig(**SIZES, num_layers=2, attention_types=[[["global"], 2]], activation_function="gelu"),
}
