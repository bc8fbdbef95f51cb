from transformers import Qwen3Config

from table.llama import SIZES

CASES = {
    "grouped": Qwen3Config(**SIZES, head_dim=6),
    "tied, biases, odd head": Qwen3Config(**SIZES, head_dim=14, tie_word_embeddings=True, attention_bias=True),
}
