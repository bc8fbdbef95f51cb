from transformers import CONFIG_MAPPING, Gemma4TextConfig

from support.families.llama import SIZES

DEEP = {
    **SIZES,
    "num_hidden_layers": 5,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
INPUTS = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 31}
UNIFIED = {key: value for key, value in DEEP.items() if key != "hidden_size_per_layer_input"}
CASES = {
    "wide global heads": Gemma4TextConfig(**DEEP),
    "keys as values, cap, biases, untied": Gemma4TextConfig(
        **DEEP,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=3.0,
        attention_bias=True,
        tie_word_embeddings=False,
        rms_norm_eps=0.01,
    ),
    "experts": Gemma4TextConfig(
        **DEEP, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=12, attention_k_eq_v=True
    ),
    "inputs of layers, shared keys, wide last layers": Gemma4TextConfig(
        **{**DEEP, **INPUTS}, num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_activation="silu"
    ),
    "unified": CONFIG_MAPPING["gemma4_unified_text"](**UNIFIED),
}
