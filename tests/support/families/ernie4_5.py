from transformers import Ernie4_5Config

from support.families.llama import SIZES

CASES = {
    "tied": Ernie4_5Config(**SIZES, head_dim=8),
    "biases, untied": Ernie4_5Config(
        **{**SIZES, "num_key_value_heads": None},
        head_dim=None,
        use_bias=True,
        tie_word_embeddings=False,
        hidden_act="gelu",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
}
