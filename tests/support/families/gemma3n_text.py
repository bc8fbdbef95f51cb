from transformers import Gemma3nTextConfig

from support.families.llama import SIZES

DEEP = {
    **SIZES,
    "num_hidden_layers": 6,
    "head_dim": 8,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 29,
    "laurel_rank": 5,
}
CASES = {
    "shared keys, few active units": Gemma3nTextConfig(
        **DEEP, num_kv_shared_layers=2, activation_sparsity_pattern=[0.9, 0.7, 0.0, 0.0, 0.0, 0.0]
    ),
    "one layer works on the third of three streams, widths by layer, biases, no cap, untied": Gemma3nTextConfig(
        **DEEP
        | {
            "num_kv_shared_layers": 0,
            "intermediate_size": [40, 40, 24, 24, 40, 40],
            "altup_num_inputs": 3,
            "altup_active_idx": 2,
            "hidden_activation": "silu",
            "attention_bias": True,
            "final_logit_softcapping": 1e4,
            "tie_word_embeddings": False,
            "rms_norm_eps": 0.01,
        }
    ),
}
