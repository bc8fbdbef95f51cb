from transformers import VaultGemmaConfig

from support.families.qwen2 import DEEP

FULL, LOCAL = "full_attention", "sliding_attention"
CASES = {
    "as published": VaultGemmaConfig(**DEEP, head_dim=6, sliding_window=5, query_pre_attn_scalar=9),
    "no caps, biases, untied, other layers": VaultGemmaConfig(
        **{**DEEP, "num_key_value_heads": 1},
        head_dim=10,
        sliding_window=3,
        layer_types=[FULL, LOCAL, LOCAL, FULL],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        hidden_activation="gelu",
        rms_norm_eps=0.01,
    ),
}
