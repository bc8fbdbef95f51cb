"""Architectures of llama.cpp that resemble Llama and have no experts. See architectures.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import (
    Architecture,
    Parts,
    experts,
    layer_norm,
    rms,
    same_width,
    self_attention,
    window_keys,
    windowed,
)
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.rope import FREQS, LONG, SHORT, rotary
from onward.config.attention_options import LogScale
from onward.config.decoder import (
    XIELU,
    BranchNorm,
    DecoderConfig,
    Gated,
    LayerNorm,
    Learned,
    NoPosition,
    Plain,
    PreNorm,
    Sandwich,
    SelfAttention,
    SharedNorm,
    at,
)
from onward.config.scaling import YaRNScaling, yarn_magnitude
from onward.families import Row
from onward.families.bitnet import NormedAttention, NormedGated

BIASED = SelfAttention(bias=True, out_bias=True)


def llama(keys: Keys, sizes: Parts) -> Parts:
    sparse, bias = keys.number("expert_count", 0), keys.has("blk.0.ffn_up.bias")
    attention = self_attention(keys, out_bias=keys.has("blk.0.attn_output.bias"))
    return plain(keys, sizes) | {
        "attention": attention,
        "mlp": replace(experts(keys, renormalize=True), d_ff=0) if sparse else Gated(bias=bias),
    }


def plain(keys: Keys, sizes: Parts) -> Parts:
    """The fields that every Llama sets; architectures that resemble Llama change some of them."""
    return rms(keys) | {"position": rotary(keys, sizes), "attention": self_attention(keys), "mlp": Gated()}


def qwen2(keys: Keys, sizes: Parts) -> Parts:
    return plain(keys, sizes) | {"head_bias": keys.has("output.bias")}


def qwen3(keys: Keys, sizes: Parts) -> Parts:
    return plain(keys, sizes) | {"attention": self_attention(keys, qk_norm="head")}


def same_epsilon(c: DecoderConfig) -> dict[str, Any]:
    """The epsilon of the LayerNorm, also written under the key for RMSNorm, as the reference converter does."""
    return {"attention.layer_norm_rms_epsilon": getattr(at(c.norm, 0), "eps", 0.0)}


def only_windowed(keys: Keys, sizes: Parts, period: int, window: int | None, **changes: Any) -> Parts:
    """Attention with windows in all layers but every `period`-th, and rotary positions in the layers with a window;
    if `window` is None, the file must give its length."""
    part = self_attention(keys, **changes)
    layers = windowed(keys, part, period, sizes["n_layers"], keys.number("attention.sliding_window", window))
    rotated = rotary(keys, sizes)
    return {"attention": layers, "position": tuple(rotated if part.window else NoPosition() for part in layers)}


def olmo(keys: Keys, sizes: Parts) -> Parts:
    norm = LayerNorm(keys.number("attention.layer_norm_epsilon"), bias=False, weight=False)
    attention = self_attention(keys, clip=keys.number("attention.clamp_kqv", 0.0) or None)
    return {"norm": norm, "position": rotary(keys, sizes), "attention": attention, "mlp": Gated()}


def olmo_keys(c: DecoderConfig) -> dict[str, Any]:
    clip = getattr(at(c.attention, 0), "clip", None)
    return {"attention.clamp_kqv": clip} if clip else {}


def olmo2(keys: Keys, sizes: Parts) -> Parts:
    part, rotated = self_attention(keys, qk_norm="width"), rotary(keys, sizes)
    parts = plain(keys, sizes) | {"attention": part, "block": BranchNorm()}
    if not keys.number("attention.sliding_window", 0):
        return parts
    layers = windowed(keys, part, 4, sizes["n_layers"], 0)  # Olmo 3: no scaling in the layers with a window
    return parts | {
        "attention": layers,
        "position": tuple(replace(rotated, scaling=None) if part.window else rotated for part in layers),
    }


def command_r(keys: Keys, sizes: Parts) -> Parts:
    attention = self_attention(keys, qk_norm="heads" if sizes["n_layers"] >= 64 else "none")
    parts = layer_norm(keys, bias=False) | {"position": rotary(keys, sizes), "attention": attention}
    return parts | {"mlp": Gated(), "block": SharedNorm(), "logit_scale": keys.number("logit_scale", 0.0) or 1.0}


def command_r_keys(c: DecoderConfig) -> dict[str, Any]:
    return {"logit_scale": c.logit_scale, "rope.scaling.type": "none"} | same_epsilon(c)


def cohere2(keys: Keys, sizes: Parts) -> Parts:
    return command_r(keys, sizes) | only_windowed(keys, sizes, 4, None)


def cohere2_keys(c: DecoderConfig) -> dict[str, Any]:
    return {"logit_scale": c.logit_scale, "rope.scaling.type": "none"} | window_keys(c)


def granite(keys: Keys, sizes: Parts) -> Parts:
    parts = llama(keys, sizes)
    rotated = keys.get("rope.scaling.finetuned", True)
    return parts | {
        "position": parts["position"] if rotated else NoPosition(),
        "attention": replace(parts["attention"], scale=keys.number("attention.scale", 0.0) or None),
        "embed_scale": keys.number("embedding_scale", 0.0) or 1.0,
        "block": PreNorm(keys.number("residual_scale", 0.0) or 1.0),
        "logit_scale": 1 / keys.number("logit_scale"),
    }


def granite_keys(c: DecoderConfig) -> dict[str, Any]:
    parts = [part for layer in range(c.n_layers) if isinstance(part := at(c.attention, layer), SelfAttention)]
    scale = (parts[0].scale if parts else None) or c.d_head**-0.5
    own = {"attention.scale": scale, "embedding_scale": c.embed_scale, "logit_scale": 1 / c.logit_scale}
    return (
        own
        | {"residual_scale": getattr(at(c.block, 0), "residual_scale", 1.0)}
        | same_width(c)
        | ({"rope.scaling.finetuned": False} if isinstance(at(c.position, 0), NoPosition) else {})
    )


def smollm3(keys: Keys, sizes: Parts) -> Parts:
    rotated = rotary(keys, sizes)
    layers = tuple(rotated if (layer + 1) % 4 else NoPosition() for layer in range(sizes["n_layers"]))
    return plain(keys, sizes) | {"position": layers}


def exaone4(keys: Keys, sizes: Parts) -> Parts:
    parts = plain(keys, sizes) | {"attention": self_attention(keys, qk_norm="head"), "block": BranchNorm()}
    return parts | (only_windowed(keys, sizes, 4, 4096, qk_norm="head") if sizes["n_layers"] == 64 else {})


def glm4(keys: Keys, sizes: Parts) -> Parts:
    return plain(keys, sizes) | {"block": Sandwich()}


def seed_oss(keys: Keys, sizes: Parts) -> Parts:
    return plain(keys, sizes) | {"attention": self_attention(keys, scale=keys.number("attention.scale", 0.0) or None)}


def late_norm(c: DecoderConfig) -> dict[str, str]:
    """In the file, the norm before the feed-forward is named like a norm after attention."""
    return {"post_attention_norm": "mlp_norm", "ffn_norm": ""}


def arcee(keys: Keys, sizes: Parts) -> Parts:
    return plain(keys, sizes) | {"mlp": Plain("relu2")}


def ernie4_5(keys: Keys, sizes: Parts) -> Parts:
    return plain(keys, sizes) | {"attention": self_attention(keys, out_bias=keys.has("blk.0.attn_output.bias"))}


def starcoder(keys: Keys, sizes: Parts) -> Parts:
    return layer_norm(keys) | {"position": Learned(), "attention": BIASED, "mlp": Plain("gelu_tanh", True)}


def nemotron(keys: Keys, sizes: Parts) -> Parts:
    attention = self_attention(keys, out_bias=keys.has("blk.0.attn_output.bias"))
    norm = LayerNorm(keys.number("attention.layer_norm_epsilon"), offset=1.0)
    mlp = Plain("relu2", keys.has("blk.0.ffn_up.bias"))
    return {"norm": norm, "position": rotary(keys, sizes), "attention": attention, "mlp": mlp}


def mistral3(keys: Keys, sizes: Parts) -> Parts:
    parts = llama(keys, sizes)
    weight, position = keys.number("attention.temperature_scale", 0.0), parts["position"]
    if weight:
        original = keys.number("rope.scaling.original_context_length", sizes["context_length"])
        parts["attention"] = replace(parts["attention"], query_scale=LogScale(weight, original))
    if isinstance(scaling := position.scaling, YaRNScaling):
        log = yarn_magnitude(scaling.factor, keys.number("rope.scaling.yarn_log_multiplier", 0.0))
        fast, slow = (keys.number(f"rope.scaling.yarn_beta_{end}", usual) for end, usual in (("fast", 32), ("slow", 1)))
        scaling = replace(scaling, attention_factor=scaling.magnitude / log, beta_fast=fast, beta_slow=slow)
        parts["position"] = replace(position, scaling=scaling)
    return parts


def mistral3_keys(c: DecoderConfig) -> dict[str, Any]:
    factor = getattr(at(c.attention, 0), "query_scale", None)
    if not isinstance(factor, LogScale):
        return same_width(c)
    original = {"rope.scaling.original_context_length": factor.original}
    return same_width(c) | original | {"attention.temperature_scale": factor.weight}


def hunyuan(keys: Keys, sizes: Parts) -> Parts:
    parts, alpha = plain(keys, sizes), keys.number("rope.scaling.alpha", 0.0)
    if alpha > 0:
        width = sizes["d_head"]
        theta = parts["position"].theta * alpha ** (width / (width - 2))
        parts["position"] = replace(parts["position"], theta=theta)
    return parts | {"attention": self_attention(keys, qk_norm="head", norm_rotated=True)}


def jais2(keys: Keys, sizes: Parts) -> Parts:
    return layer_norm(keys) | {"position": rotary(keys, sizes), "attention": BIASED, "mlp": Plain("relu2", True)}


@dataclass(frozen=True)
class ApertusArchitecture(Architecture):
    """Llama with xIELU, whose parameters are metadata keys: for each parameter, a list with a number for each layer."""

    def names(self, c: DecoderConfig) -> Iterator[Row]:
        yield from super().names(c)
        for i in range(c.n_layers):
            for name in XIELU_NUMBERS:
                yield f"blk.{i}.xielu.{name}", f"blocks.{i}.mlp.act.{name}"

    def tensors(self, c: DecoderConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor) for name, tensor in super().tensors(c, ours) if ".xielu." not in name)

    def numbers(self, keys: Keys) -> dict[str, float]:
        layers, result = keys.number("block_count"), dict[str, float]()
        for name in XIELU_NUMBERS:
            values = keys.header.keys.get(f"xielu.{name}")
            values = values if isinstance(values, list) else [values] * layers
            if len(values) != layers or not all(type(value) is float for value in values):
                raise UserError(f"{keys.header.path} has no xielu.{name} for each of {layers} layers: get it again")
            result |= {f"blk.{i}.xielu.{name}": value for i, value in enumerate(values)}
        return result

    def number_keys(self, c: DecoderConfig, ours: Mapping[str, Tensor]) -> dict[str, Any]:
        own = lambda name: [ours[f"blocks.{i}.mlp.act.{name}"].item() for i in range(c.n_layers)]
        return {f"xielu.{name}": own(name) for name in XIELU_NUMBERS}


def apertus(keys: Keys, sizes: Parts) -> Parts:
    out_bias = keys.has("blk.0.attn_output.bias")
    return plain(keys, sizes) | {"attention": self_attention(keys, qk_norm="head", out_bias=out_bias), "mlp": XIELU()}


def bitnet(keys: Keys, sizes: Parts) -> Parts:
    return plain(keys, sizes) | {"attention": NormedAttention(), "mlp": NormedGated()}


def inner_norms(c: DecoderConfig) -> dict[str, str]:
    return {"attn_sub_norm": "attn.out_norm", "ffn_sub_norm": "mlp.down_norm"}


XIELU_NUMBERS = "alpha_n", "alpha_p", "beta", "eps"
ALL = (
    Architecture(
        "llama",
        ("llama", "mistral", "mixtral", "internlm3", "iquestcoder", "ministral", "cwm"),
        llama,
        same_width,
        interleaved=True,
        free_heads=True,
        factors=(FREQS, LONG, SHORT),
    ),
    Architecture("olmo", ("olmo",), olmo, olmo_keys, interleaved=True),
    Architecture("olmo2", ("olmo2", "olmo3"), olmo2, window_keys, head="required"),
    Architecture("command-r", ("cohere",), command_r, command_r_keys, interleaved=True, head="absent"),
    Architecture("cohere2", ("cohere2",), cohere2, cohere2_keys, interleaved=True, head="absent"),
    Architecture(
        "granite",
        ("granite",),
        granite,
        granite_keys,
        interleaved=True,
        free_heads=True,
        factors=(FREQS, LONG, SHORT),
    ),
    Architecture("smollm3", ("smollm3",), smollm3, interleaved=True, free_heads=True),
    Architecture("exaone4", ("exaone4",), exaone4, window_keys, factors=(FREQS,)),
    Architecture("glm4", ("glm4",), glm4, interleaved=True, free_heads=True, partial=True, fused_gate=True),
    Architecture("chatglm", ("glm",), plain, interleaved=True, partial=True, fused_gate=True),
    Architecture("seed_oss", ("seed_oss",), seed_oss, free_heads=True, layer=late_norm),
    Architecture("arcee", ("arcee",), arcee, interleaved=True, free_heads=True, factors=(FREQS,)),
    Architecture("ernie4_5", ("ernie4_5",), ernie4_5, interleaved=True, free_heads=True),
    Architecture("starcoder", ("gpt_bigcode",), starcoder, fused=True),
    Architecture("nemotron", ("nemotron",), nemotron, head="required", shift=1.0, partial=True),
    Architecture(
        "mistral3",
        ("ministral3",),
        mistral3,
        mistral3_keys,
        interleaved=True,
        free_heads=True,
        factors=(FREQS, LONG, SHORT),
    ),
    Architecture("hunyuan-dense", ("hunyuan_v1_dense",), hunyuan, free_heads=True),
    Architecture("jais2", ("jais2",), jais2, free_heads=True),
    ApertusArchitecture(
        "apertus", ("apertus",), apertus, head="required", free_heads=True, factors=(FREQS, LONG, SHORT)
    ),
    Architecture("bitnet", ("bitnet",), bitnet, layer=inner_norms, head="absent"),
)
