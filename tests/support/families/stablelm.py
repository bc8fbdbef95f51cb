from transformers import StableLmConfig

from support.families.llama import SIZES

CASES = {
    "grouped, biases": StableLmConfig(**SIZES, use_qkv_bias=True, partial_rotary_factor=0.34),
    "parallel, normed heads": StableLmConfig(
        **{**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1},
        use_parallel_residual=True,
        qk_layernorm=True,
        tie_word_embeddings=True,
        layer_norm_eps=0.01,
    ),
    "multi-head, normed, whole heads turn, gelu": StableLmConfig(
        **{**SIZES, "num_key_value_heads": 4},
        qk_layernorm=True,
        hidden_act="gelu",
        partial_rotary_factor=1.0,
        rope_parameters={"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
    ),
}
