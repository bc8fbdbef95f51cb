from transformers import NanoChatConfig

from support.families.llama import SIZES

CASES = {
    "grouped": NanoChatConfig(**SIZES),
    "biases, tied, no cap": NanoChatConfig(
        **{**SIZES, "num_key_value_heads": 4},
        attention_bias=True,
        tie_word_embeddings=True,
        final_logit_softcapping=None,
        rms_norm_eps=0.01,
        hidden_act="gelu",
    ),
}
