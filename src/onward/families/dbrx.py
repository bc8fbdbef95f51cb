"""DBRX: Mixtral with 16 experts, LayerNorm, and clamped queries, keys and values (Databricks 2024)."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, LayerNorm, SelfAttention
from onward.config.routing import SoftmaxRouting
from onward.families import ACTIVATIONS, HF, Row, activation, only, require, sizes
from onward.families._rope import a_rotary, rope, rotary

ARCHITECTURES = {"dbrx": "DbrxForCausalLM"}
SOURCE = "huggingface.co/databricks/dbrx-instruct"
BASE = "transformer."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "dbrx-132b": {
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "max_seq_len": 32_768,
        "vocab_size": 100_352,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500_000.0},
        "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4},
    }
}
ANCESTORS = {"dbrx": "mixtral-8x22b"}
POWER = "moe_normalize_expert_weights"  # order p of the norm by which the weights are divided
SIZES = {
    "vocab_size": ("vocab_size", 32_000),
    "d_model": ("d_model", 2048),
    "n_layers": ("n_layers", 24),
    "n_heads": ("n_heads", 16),
    "context_length": ("max_seq_len", 2048),
    "dropout": ("resid_pdrop", 0.0),
}


def config(hf: HF) -> DecoderConfig:
    only(hf, tie_word_embeddings=False)
    attention, experts = hf.get("attn_config") or {}, hf.get("ffn_config") or {}
    hf.get("num_key_value_heads")  # equivalent to kv_n_heads; reading it prevents a warning
    only(experts, moe_normalize_expert_weights=None if (power := experts.get(POWER, 1.0)) is None else 1.0)
    only(experts, uniform_expert_assignment=False)
    act: Any = (experts.get("ffn_act_fn") or {}).get("name", "silu")
    # the theta used in training, which transformers 5 ignores in old files
    theta = attention.get("rope_theta", 10_000.0)
    return DecoderConfig(
        **sizes(hf, SIZES),
        n_kv_heads=attention.get("kv_n_heads", 1),
        d_ff=experts.get("ffn_hidden_size", 3584),
        position=rotary(hf, context=hf.get("max_seq_len", 2048), theta=theta),
        attention=SelfAttention(clip=attention.get("clip_qkv")),
        mlp=Experts(
            count=experts.get("moe_num_experts", 4),
            top_k=experts.get("moe_top_k", 1),
            router=SoftmaxRouting(renormalize=power is not None),
            act=ACTIVATIONS.get(act, act),
        ),
        norm=LayerNorm(bias=False),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    mlp = require(c.mlp, Experts)
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        **rope(c.position),
        "emb_pdrop": c.dropout,
        "attn_config": {
            "attn_pdrop": c.dropout,
            "clip_qkv": require(c.attention, SelfAttention).clip,
            "kv_n_heads": c.n_kv_heads,
            "rope_theta": a_rotary(c).theta,
        },
        "ffn_config": {
            "ffn_act_fn": {"name": activation(mlp)},
            "ffn_hidden_size": c.d_ff,
            "moe_num_experts": mlp.count,
            "moe_top_k": mlp.top_k,
            POWER: 1.0 if mlp.router.renormalize else None,
        },
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    stack = lambda t: t.unflatten(0, (-1, c.d_ff)), lambda t: t.flatten(0, 1)
    yield "transformer.wte.weight", "embed.weight"
    yield "transformer.norm_f.weight", "norm.weight"
    yield "lm_head.weight", "head.weight"
    for i in range(c.n_layers):
        their, our = f"transformer.blocks.{i}.norm_attn_norm", f"blocks.{i}"
        yield f"{their}.norm_1.weight", f"{our}.attn_norm.weight"
        yield f"{their}.norm_2.weight", f"{our}.mlp_norm.weight"
        yield f"{their}.attn.Wqkv.weight", [f"{our}.attn.{name}.weight" for name in "qkv"]
        yield f"{their}.attn.out_proj.weight", f"{our}.attn.out.weight"
        their = f"transformer.blocks.{i}.ffn"
        yield f"{their}.router.layer.weight", f"{our}.mlp.router.weight"
        yield f"{their}.experts.mlp.w1", f"{our}.mlp.gate", stack
        yield f"{their}.experts.mlp.v1", f"{our}.mlp.up", stack
        yield f"{their}.experts.mlp.w2", f"{our}.mlp.down", (lambda t: stack[0](t).mT, lambda t: stack[1](t.mT))
