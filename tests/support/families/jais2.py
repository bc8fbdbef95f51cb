from transformers import Jais2Config

from support.families.llama import SIZES

CASES = {
    "all biases": Jais2Config(**SIZES),
    "biases of norms only, tied": Jais2Config(
        **{**SIZES, "num_key_value_heads": None},
        head_dim=10,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        hidden_act="gelu",
        layer_norm_eps=0.01,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
}
