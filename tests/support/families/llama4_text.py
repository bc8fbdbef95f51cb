from transformers import Llama4TextConfig

from support.families.qwen2 import DEEP

SMALL = {**DEEP, "head_dim": 6, "intermediate_size": 12, "intermediate_size_mlp": 20, "num_local_experts": 4}
CASES = {
    "chunks, every fourth layer sees all": Llama4TextConfig(
        **SMALL, attention_chunk_size=5, floor_scale=3, attn_scale=0.4
    ),
    "two experts, dense layers, no norms, other layers, tied": Llama4TextConfig(
        **SMALL,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_chunk_size=3,
        no_rope_layers=[1, 0, 0, 1],
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 300.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
}
