from transformers import HyperCLOVAXConfig

from support.families.llama import SIZES

SCALES = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.4}
CASES = {
    "plain": HyperCLOVAXConfig(**SIZES),
    "scaled, biases": HyperCLOVAXConfig(**SIZES, **SCALES, attention_multiplier=0.2, attention_bias=True),
    "no norms after branches, wide heads, tied": HyperCLOVAXConfig(
        **SIZES, **SCALES, use_post_norm=False, head_dim=8, mlp_bias=True, tie_word_embeddings=True
    ),
}
