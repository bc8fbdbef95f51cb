from transformers import Olmo2Config

from support.families.llama import SIZES

CASES = {
    "grouped": Olmo2Config(**SIZES),
    "multi-head, wide, tied, biases, squared relu": Olmo2Config(
        **{**SIZES, "num_key_value_heads": None},
        head_dim=10,
        tie_word_embeddings=True,
        attention_bias=True,
        hidden_act="relu2",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
}
