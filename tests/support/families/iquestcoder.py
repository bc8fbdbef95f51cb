from transformers import IQuestCoderConfig

from support.families.llama import SIZES

CASES = {
    "grouped, wide heads": IQuestCoderConfig(**SIZES, head_dim=10),
    "biases, tied": IQuestCoderConfig(
        **{**SIZES, "num_key_value_heads": None},
        head_dim=None,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
}
