from transformers import DiffLlamaConfig

from support.families.llama import SIZES

CASES = {
    "grouped": DiffLlamaConfig(**SIZES),
    "a pair for each value, biases, tied": DiffLlamaConfig(
        **SIZES | {"num_key_value_heads": 4},
        head_dim=8,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
    ),
}
