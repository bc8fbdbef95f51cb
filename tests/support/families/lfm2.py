from transformers import Lfm2Config

from support.families.qwen2 import DEEP, SIZES

MIXED = ["conv", "full_attention", "conv", "conv", "full_attention"]
CASES = {
    "widths rounded": Lfm2Config(**DEEP, layer_types=MIXED[: DEEP["num_hidden_layers"]], block_multiple_of=4),
    "biases, not tied": Lfm2Config(
        **DEEP, full_attn_idxs=[1], conv_bias=True, conv_L_cache=4, tie_word_embeddings=False
    ),
    "no convolutions": Lfm2Config(**SIZES, block_auto_adjust_ff_dim=False),
}
