from transformers import PhimoeConfig

from support.families.llama import SIZES

EXPERTS = {"num_local_experts": 5, "router_jitter_noise": 0.3}
CASES = {
    "grouped": PhimoeConfig(**SIZES, **EXPERTS),
    "biases, window, scaled, tied": PhimoeConfig(
        **{**SIZES, "max_position_embeddings": 64},
        **EXPERTS,
        attention_bias=True,
        lm_head_bias=True,
        tie_word_embeddings=True,
        sliding_window=5,
        rms_norm_eps=0.01,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 300.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 5.0],
            "short_mscale": 1.3,
            "long_mscale": 1.3,
        },
    ),
}
