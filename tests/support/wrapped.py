"""Text decoders that transformers has only inside multimodal models: tiny configurations of these models."""

from typing import Any

from transformers import (
    Cosmos3EdgeConfig,
    DeepseekOcr2Config,
    MuseGlimmerConfig,
    PreTrainedConfig,
    Step3p7Config,
)

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SAM = VISION | {"output_channels": 8, "downsample_channels": [8, 16], "global_attn_indexes": [0], "window_size": 2}
TEXT: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 40,
    "sliding_window": 5,
}
PLAIN = {key: value for key, value in TEXT.items() if key not in ("head_dim", "sliding_window")}
BY_TURNS = ["full_attention", "sliding_attention"] * 2
STEP = TEXT | {
    "layer_types": BY_TURNS,
    "num_sliding_attention_heads": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "share_expert_dim": 20,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
}
TURNED = {
    "full_attention": {
        "rope_type": "llama3",
        "rope_theta": 300.0,
        "partial_rotary_factor": 0.5,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
CASES: dict[str, PreTrainedConfig] = {
    "step3p5: more heads in windows": Step3p7Config(text_config=STEP, vision_config=VISION),
    "step3p5: clamped units, turns by layer, biases, a scale": Step3p7Config(
        text_config=STEP
        | {
            "swiglu_limits": [0.0, 0.05, 0.0, 0.0],
            "swiglu_limits_shared": [0.0, 0.05, 0.04, 0.03],
            "rope_parameters": TURNED,
            "attention_bias": True,
            "query_pre_attn_scalar": 20,
            "moe_router_scaling_factor": 3.0,
            "rms_norm_eps": 0.01,
        },
        vision_config=VISION,
    ),
    "muse_glimmer_text: windows with positions": MuseGlimmerConfig(text_config=TEXT, vision_config=VISION),
    "muse_glimmer_text: epsilons, biases, tied, other layers rotated": MuseGlimmerConfig(
        text_config=TEXT
        | {
            "layer_types": BY_TURNS,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
            "layer_rope_theta": [300.0, 300.0, 0, 0],
            "attention_bias": True,
            "rms_norm_eps": 0.02,
            "post_norm_eps": 0.1,
            "hidden_activation": "gelu",
            "qk_scale_factor": 2.0,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 2.0,
        },
        vision_config=VISION,
    ),
    "cosmos3_edge_text: biases": Cosmos3EdgeConfig(
        text_config=PLAIN | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        vision_config=VISION,
    ),
    "deepseek_ocr2_text: groups": DeepseekOcr2Config(
        text_config=PLAIN
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.5,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "attention_bias": True,
        },
        vision_config={"sam_config": SAM, "encoder_config": VISION | {"num_key_value_heads": 2, "vocab_size": 3}},
    ),
}
