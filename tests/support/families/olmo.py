from transformers import OlmoConfig

from support.families.llama import SIZES

CASES = {
    "grouped": OlmoConfig(**SIZES),
    "clipped, biases, tied": OlmoConfig(**SIZES, clip_qkv=0.2, attention_bias=True, tie_word_embeddings=True),
}
