from transformers import GlmMoeDsaConfig

from support.families.deepseek_v2 import SIZES
from support.families.deepseek_v32 import INDEXER

CASES = {
    "shared choices, biases": GlmMoeDsaConfig(
        **SIZES, **INDEXER, indexer_types=["full", "shared", "full"], first_k_dense_replace=2, attention_bias=True
    ),
    "a pattern": GlmMoeDsaConfig(**{**SIZES, "num_hidden_layers": 4}, **INDEXER, index_topk_pattern="FSSF"),
    "every second layer": GlmMoeDsaConfig(
        **{**SIZES, "num_hidden_layers": 4}, **INDEXER, index_topk_freq=2, index_skip_topk_offset=1
    ),
}
