from transformers import BioGptConfig

from support.families.persimmon import SIZES

PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CASES = {
    "scaled, tied": BioGptConfig(**SIZES),
    "not scaled, untied": BioGptConfig(
        **SIZES,
        **PLAIN,
        scale_embedding=False,
        tie_word_embeddings=False,
        hidden_act="relu",
        layer_norm_eps=0.01,
    ),
}
