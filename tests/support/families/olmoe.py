from transformers import OlmoeConfig

from support.families.llama import SIZES

TINY = {**SIZES, "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None}
CASES = {
    "shares as they are": OlmoeConfig(**TINY),
    "weights sum to 1, multi-head, biases, tied": OlmoeConfig(
        **{**TINY, "num_key_value_heads": None},
        norm_topk_prob=True,
        attention_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
}
