from transformers import SmolLM3Config

from support.families.qwen2 import DEEP, SIZES

PAD = {"pad_token_id": None}
CASES = {
    "one layer in four without positions": SmolLM3Config(**DEEP, **PAD),
    "other layers, untied, biases": SmolLM3Config(
        **DEEP,
        **PAD,
        no_rope_layers=[0, 1, 1, 0],
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "every other layer, with windows there": SmolLM3Config(
        **DEEP, **PAD, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=5
    ),
    "windows by layer, wide heads": SmolLM3Config(
        **DEEP,
        **PAD,
        head_dim=10,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention", "full_attention", "full_attention"],
    ),
    "no positions": SmolLM3Config(**SIZES, **PAD, no_rope_layers=[0, 0]),
}
