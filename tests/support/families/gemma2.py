from transformers import Gemma2Config

from support.families.llama import SIZES

WINDOWS = {**SIZES, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 5}
CASES = {
    "alternating": Gemma2Config(**WINDOWS, query_pre_attn_scalar=5),
    "own scale, low caps": Gemma2Config(
        **WINDOWS, query_pre_attn_scalar=8, attn_logit_softcapping=0.5, final_logit_softcapping=2.0
    ),
    "no caps, biases, untied, gelu": Gemma2Config(
        **WINDOWS,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        hidden_activation="gelu",
        rms_norm_eps=0.01,
    ),
    "windows as listed": Gemma2Config(
        **WINDOWS, layer_types=["full_attention", "sliding_attention", "sliding_attention"]
    ),
    "no window": Gemma2Config(**WINDOWS, layer_types=["full_attention"] * 3),
}
