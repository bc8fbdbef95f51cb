"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: layers of one branch, which is Mamba-2, attention without positions, a
feed-forward, or experts that are not gated (NVIDIA 2025)."""

from collections.abc import Iterator
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import (
    AttentionOnly,
    DecoderConfig,
    Experts,
    FeedForwardOnly,
    Mamba2,
    NoAttention,
    NoPosition,
    Plain,
    RMSNorm,
    SelfAttention,
    at,
)
from onward.config.routing import SigmoidRouting
from onward.families import ACTIVATIONS, HF, Inexpressible, Row, activation, linear, only, require, sizes
from onward.families._experts import KEYS, ROUTER
from onward.families._layers import FULL
from onward.families._recurrent import LINEAR, check_steps, mamba2_names, one

ARCHITECTURES = {"nemotron_h": "NemotronHForCausalLM"}
SOURCE = "arXiv:2504.03624, arXiv:2508.14444, arXiv:2512.20848"
BASE = ""
IGNORED = r"^mtp\."
PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
FEED_FORWARDS = "mlp", "moe"
OLD = {"mamba": LINEAR, "attention": FULL}
H8 = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NANO = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NANO_3 = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
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
    "nemotron-3-nano-30b-a3b": {
        "hybrid_override_pattern": NANO_3,
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "num_key_value_heads": 2,
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 262_144,
    },
}
ANCESTORS = {
    "nemotron-h": "mamba-codestral-7b",
    "nemotron-nano": "nemotron-h-8b",
    "nemotron-3-nano": "nemotron-nano-9b-v2",
}
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
    "step_min": ("time_step_min", 0.001),  # the default of transformers, which differs from NVIDIA's own code
}


EXPERTS = KEYS | {"d_shared": "moe_shared_expert_intermediate_size", "d_latent": "moe_latent_size"}
EXPERT_DEFAULTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
}


def kinds(hf: HF) -> list[str]:
    """The type of each layer."""
    given = hf.get("layers_block_type") or hf.get("layer_types")
    if given is None:
        given = [PATTERN.get(letter, letter) for letter in hf.get("hybrid_override_pattern", "ME*-")]
    found = [OLD.get(kind, kind) for kind in given]
    if not found or not {*found} <= {LINEAR, FULL, *FEED_FORWARDS}:
        raise UserError(f"config.json has layers {found}: Onward reads {LINEAR}, {FULL}, mlp and moe")
    return found


def config(hf: HF) -> DecoderConfig:
    check_steps(hf)
    only(hf, mamba_hidden_act="silu", sliding_window=None, mamba_proj_bias=False, attention_bias=False)
    for key in "num_hidden_layers", "expand", "n_shared_experts":  # the values of these keys follow from the layers
        hf.get(key)
    found, eps = kinds(hf), hf.get("layer_norm_epsilon", 1e-5)
    mixers = {FULL: SelfAttention(), LINEAR: Mamba2(**sizes(hf, MAMBA), norm_eps=eps)}
    act: Any = hf.get("mlp_hidden_act", "relu2")
    plain, many = Plain(act=ACTIVATIONS.get(act, act), bias=hf.get("mlp_bias", False)), mixture(hf, act)
    if "moe" in found and plain.bias:
        raise UserError("config.json has mlp_bias true, but Onward supports only experts without biases")
    return DecoderConfig(
        **sizes(hf, SIZES),
        n_layers=len(found),
        position=NoPosition(),
        attention=tuple(mixers.get(kind, NoAttention()) for kind in found),
        mlp=tuple(many if kind == "moe" else plain for kind in found) if "moe" in found else plain,
        norm=RMSNorm(eps=eps),
        block=tuple(FeedForwardOnly() if kind in FEED_FORWARDS else AttentionOnly() for kind in found),
    )


def mixture(hf: HF, act: Any) -> Experts:
    given: dict[str, Any] = {our: hf.get(their, EXPERT_DEFAULTS[their]) for our, their in EXPERTS.items()}
    given["d_latent"] = given["d_latent"] or 0
    router = SigmoidRouting(*(hf.get(key, default) for key, default in zip(ROUTER, (True, 1.0, 1, 1))))
    return Experts(**given, router=router, act=ACTIVATIONS.get(act, act), gated=False)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    mamba, eps = one(c, Mamba2, Mamba2()), require(c.norm, RMSNorm).eps
    keys = {their: getattr(c, our) for our, (their, _) in SIZES.items()}
    keys |= {their: getattr(mamba, our) for our, (their, _) in MAMBA.items()}
    keys |= {"mamba_num_heads": mamba.count(c), "layers_block_type": types(c), "layer_norm_epsilon": eps}
    parts = [at(c.mlp, i) for i in range(c.n_layers)]
    plain = next((part for part in parts if isinstance(part, Plain)), None)
    many = next((part for part in parts if isinstance(part, Experts)), None)
    if many:
        width = {"moe_intermediate_size": many.width(c), "moe_latent_size": many.d_latent or None}
        routing = many.router.renormalize, many.router.scale, many.router.n_groups, many.router.top_k_groups
        keys |= {their: getattr(many, our) for our, their in EXPERTS.items()} | width | dict(zip(ROUTER, routing))
    if first := plain or many:
        keys |= {"mlp_hidden_act": activation(first), "mlp_bias": first.bias}
    return keys


def types(c: DecoderConfig) -> list[str]:
    """The type of each layer."""
    mixers = {Mamba2: LINEAR, SelfAttention: FULL, NoAttention: "mlp"}
    parts = [at(c.attention, i) for i in range(c.n_layers)]
    if odd := [part for part in parts if type(part) not in mixers]:
        raise Inexpressible(f"no layers of the kind {odd[0].kind}")
    found = [mixers[type(part)] for part in parts]
    return ["moe" if kind == "mlp" and isinstance(at(c.mlp, i), Experts) else kind for i, kind in enumerate(found)]


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
        part = at(c.mlp, i)
        for name in "up", "down":
            if not isinstance(part, Experts):
                yield from linear(f"{their}.mixer.{name}_proj", f"{our}.mlp.{name}")
                continue
            yield from linear(f"{their}.mixer.shared_experts.{name}_proj", f"{our}.mlp.shared.{name}")
            matrices = [f"{their}.mixer.experts.{expert}.{name}_proj.weight" for expert in range(part.count)]
            yield matrices, f"{our}.mlp.{name}"
        if isinstance(part, Experts):
            yield from linear(f"{their}.mixer.gate", f"{our}.mlp.router")
            yield f"{their}.mixer.gate.e_score_correction_bias", f"{our}.mlp.router.routing_bias"
            for name, ours in ("fc1", "latent_in"), ("fc2", "latent_out"):
                yield from linear(f"{their}.mixer.{name}_latent_proj", f"{our}.mlp.{ours}")
