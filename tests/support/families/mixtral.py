from transformers import MixtralConfig

from support.families.llama import SIZES

CASES = {
    "two of eight": MixtralConfig(**SIZES),
    "three of five, window, tied": MixtralConfig(
        **SIZES,
        head_dim=10,
        num_local_experts=5,
        num_experts_per_tok=3,
        sliding_window=5,
        tie_word_embeddings=True,
        hidden_act="gelu",
    ),
    "one expert": MixtralConfig(**SIZES, num_local_experts=1, num_experts_per_tok=1),
}
