from transformers import GptOssConfig

from support.families.llama import SIZES

SMALL = {**SIZES, "intermediate_size": 12, "head_dim": 6, "num_local_experts": 6}
FULL, SLIDING = "full_attention", "sliding_attention"

CASES = {
    "as published": GptOssConfig(**{**SMALL, "num_hidden_layers": 3}, sliding_window=5),
    "windows by name, no biases, other gates, tied": GptOssConfig(
        **{**SMALL, "num_key_value_heads": 1},
        sliding_window=3,
        layer_types=[FULL, SLIDING],
        attention_bias=False,
        swiglu_limit=0.1,
        swiglu_alpha=0.9,
        num_experts_per_tok=1,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
    ),
    "no windows, plain turns": GptOssConfig(
        **{**SMALL, "num_key_value_heads": 4},
        layer_types=[FULL, FULL],
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
    ),
}
