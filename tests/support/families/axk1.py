from transformers import AXK1Config

from support.families.deepseek_v2 import GROUPS, SIZES

CASES = {
    "groups, a dense layer first": AXK1Config(**SIZES, **GROUPS),
    "in halves, sparse throughout, tied": AXK1Config(
        **SIZES,
        **GROUPS,
        rope_interleave=False,
        mlp_layer_types=["sparse"] * SIZES["num_hidden_layers"],
        norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
}
