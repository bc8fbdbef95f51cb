from transformers import GraniteConfig

from support.families.llama import SIZES

CASES = {
    "no multipliers, biases": GraniteConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "multipliers": GraniteConfig(
        **SIZES,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
        logits_scaling=8.0,
        tie_word_embeddings=True,
    ),
    "odd multipliers, wide heads": GraniteConfig(
        **{**SIZES, "num_key_value_heads": 1},
        head_dim=16,
        attention_multiplier=0.25,
        logits_scaling=49.0,
        residual_multiplier=3,
        embedding_multiplier=0.3,
    ),
}
