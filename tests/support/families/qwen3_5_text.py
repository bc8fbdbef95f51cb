from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from support.families.qwen2 import DEEP
from support.families.qwen3_moe import EXPERTS
from support.families.qwen3_next import DELTA, SHARED

SPARSE = {key: size for key, size in DEEP.items() if key != "intermediate_size"}
CASES = {
    "dense": Qwen3_5TextConfig(**DEEP, **DELTA),
    "tied, biases": Qwen3_5TextConfig(**DEEP, **DELTA, tie_word_embeddings=True, attention_bias=True),
    "experts": Qwen3_5MoeTextConfig(**SPARSE, **DELTA, **EXPERTS, **SHARED),
}
