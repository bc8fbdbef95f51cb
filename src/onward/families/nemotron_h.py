"""Nemotron-H and Nemotron Nano 2: layers of one branch, Mamba-2, attention without positions or a feed-forward (NVIDIA
2025)."""

from collections.abc import Iterator
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import (
    AttentionOnly,
    DecoderConfig,
    FeedForwardOnly,
    Mamba2,
    NoAttention,
    NoPosition,
    Plain,
    RMSNorm,
    SelfAttention,
    at,
)
from onward.families import ACTIVATIONS, HF, Inexpressible, Row, activation, linear, only, require, sizes
from onward.families._layers import FULL
from onward.families._recurrent import LINEAR, check_steps, mamba2_names, one

ARCHITECTURES = {"nemotron_h": "NemotronHForCausalLM"}
BASE = ""
IGNORED = r"^mtp\."
PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
OLD = {"mamba": LINEAR, "attention": FULL}
H8 = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NANO = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
PRESETS: dict[str, HF] = {
    "nemotron-h-8b": {"hybrid_override_pattern": H8, "max_position_embeddings": 8192},
    "nemotron-nano-9b-v2": {
        "hybrid_override_pattern": NANO,
        "hidden_size": 4480,
        "intermediate_size": 15_680,
        "num_attention_heads": 40,
        "mamba_head_dim": 80,
        "max_position_embeddings": 131_072,
    },
}
ANCESTORS = {"nemotron-h": "mamba-codestral-7b", "nemotron-nano": "nemotron-h-8b"}
SIZES = {
    "vocab_size": ("vocab_size", 131_072),
    "d_model": ("hidden_size", 4096),
    "n_heads": ("num_attention_heads", 32),
    "n_kv_heads": ("num_key_value_heads", 8),
    "d_head": ("head_dim", 128),
    "d_ff": ("intermediate_size", 21_504),
    "context_length": ("max_position_embeddings", 4096),
    "tied": ("tie_word_embeddings", False),
    "dropout": ("attention_dropout", 0.0),
}
MAMBA = {
    "n_heads": ("mamba_num_heads", 128),
    "d_head": ("mamba_head_dim", 64),
    "n_groups": ("n_groups", 8),
    "d_state": ("ssm_state_size", 128),
    "d_conv": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
    "step_min": ("time_step_min", 0.001),  # as in transformers, not in NVIDIA's own code
}


EXPERTS = (  # keys without a meaning for the layers that are read
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
)


def kinds(hf: HF) -> list[str]:
    """The type of each layer."""
    given = hf.get("layers_block_type") or hf.get("layer_types")
    if given is None:
        given = [PATTERN.get(letter, letter) for letter in hf.get("hybrid_override_pattern", "ME*-")]
    found = [OLD.get(kind, kind) for kind in given]
    if not found or not {*found} <= {LINEAR, FULL, "mlp"}:
        raise UserError(f"config.json has layers {found}: Onward reads {LINEAR}, {FULL} and mlp, not yet moe")
    return found


def config(hf: HF) -> DecoderConfig:
    check_steps(hf)
    only(hf, mamba_hidden_act="silu", sliding_window=None, mamba_proj_bias=False, attention_bias=False)
    for key in "num_hidden_layers", "expand", *EXPERTS:  # the types of layers say it; no layer has experts
        hf.get(key)
    found, eps = kinds(hf), hf.get("layer_norm_epsilon", 1e-5)
    act: Any = hf.get("mlp_hidden_act", "relu2")
    mixers = {FULL: SelfAttention(), LINEAR: Mamba2(**sizes(hf, MAMBA), norm_eps=eps), "mlp": NoAttention()}
    return DecoderConfig(
        **sizes(hf, SIZES),
        n_layers=len(found),
        position=NoPosition(),
        attention=tuple(mixers[kind] for kind in found),
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=hf.get("mlp_bias", False)),
        norm=RMSNorm(eps=eps),
        block=tuple(FeedForwardOnly() if kind == "mlp" else AttentionOnly() for kind in found),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    mamba, eps = one(c, Mamba2, Mamba2()), require(c.norm, RMSNorm).eps
    types = {Mamba2: LINEAR, SelfAttention: FULL, NoAttention: "mlp"}
    parts = [at(c.attention, i) for i in range(c.n_layers)]
    if odd := [part for part in parts if type(part) not in types]:
        raise Inexpressible(f"no layers of the kind {odd[0].kind}")
    return (
        {their: getattr(c, our) for our, (their, _) in SIZES.items()}
        | {their: getattr(mamba, our) for our, (their, _) in MAMBA.items()}
        | {
            "mamba_num_heads": mamba.count(c),
            "layers_block_type": [types[type(part)] for part in parts],
            "layer_norm_epsilon": eps,
            "mlp_hidden_act": activation(c.mlp),
            "mlp_bias": require(c.mlp, Plain).bias,
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "backbone.embeddings.weight", "embed.weight"
    yield from linear("backbone.norm_f", "norm")
    yield from linear("lm_head", "head")
    for i in range(c.n_layers):
        their, our = f"backbone.layers.{i}", f"blocks.{i}"
        branch = "mlp" if isinstance(at(c.block, i), FeedForwardOnly) else "attn"
        yield from linear(f"{their}.norm", f"{our}.{branch}_norm")
        if isinstance(at(c.attention, i), Mamba2):
            yield from mamba2_names(f"{their}.mixer", f"{our}.attn")
            continue
        for name in "q", "k", "v":
            yield from linear(f"{their}.mixer.{name}_proj", f"{our}.attn.{name}")
        yield from linear(f"{their}.mixer.o_proj", f"{our}.attn.out")
        for name in "up", "down":
            yield from linear(f"{their}.mixer.{name}_proj", f"{our}.mlp.{name}")
