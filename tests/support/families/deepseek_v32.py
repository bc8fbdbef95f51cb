from transformers import DeepseekV32Config

from support.families.deepseek_v2 import GROUPS, SIZES, yarn

INDEXER = {"index_topk": 6, "index_head_dim": 6, "index_n_heads": 16}  # with fewer heads, scores are often tied at 0

CASES = {
    "fewer tokens than there are": DeepseekV32Config(**SIZES, **GROUPS, **INDEXER, first_k_dense_replace=1),
    "more tokens than there are, scores sharpened": DeepseekV32Config(
        **SIZES,
        **GROUPS,
        **{**INDEXER, "index_topk": 200, "index_n_heads": 1, "index_head_dim": 4},
        **yarn(mscale=1.0, mscale_all_dim=1.0),
        first_k_dense_replace=3,
    ),
}
