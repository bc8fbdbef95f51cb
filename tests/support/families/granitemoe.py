from transformers import GraniteMoeConfig, GraniteMoeSharedConfig

from support.families.llama import SIZES

EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3}
SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 6.0,
}
CASES = {
    "no multipliers, biases": GraniteMoeConfig(
        **{**SIZES, "num_key_value_heads": None}, **EXPERTS, attention_bias=True, hidden_act="gelu", rms_norm_eps=0.01
    ),
    "multipliers, tied": GraniteMoeConfig(**SIZES, **EXPERTS, **SCALES, tie_word_embeddings=True),
    "shared": GraniteMoeSharedConfig(**SIZES, **EXPERTS, **SCALES, shared_intermediate_size=20),
    "shared, of no width": GraniteMoeSharedConfig(**SIZES, **EXPERTS, tie_word_embeddings=True),
}
