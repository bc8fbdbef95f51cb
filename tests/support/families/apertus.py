from transformers import ApertusConfig

from support.families.llama import SIZES, scaled

CASES = {
    "grouped": ApertusConfig(**SIZES),
    "biases, tied, linear": ApertusConfig(
        **SIZES, **scaled(rope_type="linear"), attention_bias=True, tie_word_embeddings=True, rms_norm_eps=0.01
    ),
}
