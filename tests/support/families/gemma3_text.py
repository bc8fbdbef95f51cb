from transformers import Gemma3TextConfig

from support.families.llama import SIZES

WINDOWS = {**SIZES, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}
CASES = {
    "five local layers to a global one": Gemma3TextConfig(**{**WINDOWS, "num_hidden_layers": 7}),
    "layers as listed, scaled turns": Gemma3TextConfig(
        **{**WINDOWS, "num_hidden_layers": 3, "query_pre_attn_scalar": 5},
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "local only, capped, biases, untied, gelu": Gemma3TextConfig(
        **{**WINDOWS, "num_key_value_heads": 1},
        final_logit_softcapping=2.0,
        attention_bias=True,
        tie_word_embeddings=False,
        hidden_activation="gelu",
        rms_norm_eps=0.01,
    ),
}
