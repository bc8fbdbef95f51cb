from transformers import YoutuConfig

from support.families.deepseek_v2 import SIZES, yarn

TINY = {name: size for name, size in SIZES.items() if "expert" not in name and not name.startswith("moe")}
CASES = {
    "tied": YoutuConfig(**TINY),
    "in halves, queries from x, biases, untied": YoutuConfig(
        **{**TINY, "q_lora_rank": None},
        **yarn(mscale=1.0, mscale_all_dim=1.0),
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=False,
        hidden_act="gelu",
        rms_norm_eps=0.01,
    ),
}
