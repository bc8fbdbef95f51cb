from transformers import DbrxConfig

SIZES = {"vocab_size": 31, "d_model": 24, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}
EXPERTS = {"ffn_hidden_size": 20, "moe_num_experts": 6, "moe_top_k": 3}
CASES = {
    "clamped, grouped": DbrxConfig(
        **SIZES,
        attn_config={"clip_qkv": 0.2, "kv_n_heads": 2, "rope_theta": 10_000.0},
        ffn_config=EXPERTS,
    ),
    "shares as they are, one key/value head": DbrxConfig(
        **SIZES,
        attn_config={"clip_qkv": 8.0, "kv_n_heads": 1, "rope_theta": 300.0},
        ffn_config={**EXPERTS, "moe_normalize_expert_weights": None, "ffn_act_fn": {"name": "gelu"}},
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    ),
}
