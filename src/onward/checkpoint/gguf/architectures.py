"""The table of llama.cpp's architectures: the decoder that the keys and tensors of a GGUF file describe, and their
names.

Each is one value of ARCHITECTURES, used in both directions: a model is written as an architecture whose `config` of the
written keys is the model's own, so that whatever llama.cpp fixes without a key is compared. `config` gives what
llama.cpp computes (src/models/*.cpp), not what the published model computes where the two differ: GELU is the tanh form
everywhere, and windows are ignored in llama, qwen2, starcoder2 and phi3.

For each architecture, NAME(keys, sizes) reads the fields of DecoderConfig from a file's keys, `sizes` being those read
already; NAME_keys returns the keys for a decoder, and NAME_layer the tensor names that differ from LAYER.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.base.fields import nearest
from onward.checkpoint.gguf.architecture import (
    Architecture,
    Parts,
    expert_keys,
    experts,
    layer_norm,
    rms,
    self_attention,
    window_keys,
    windowed,
)
from onward.checkpoint.gguf.header import Header, Keys
from onward.checkpoint.gguf.latent import LatentArchitecture, deepseek2, deepseek2_keys, latent_layer
from onward.checkpoint.gguf.rope import rotary
from onward.config.decoder import (
    Alibi,
    BranchNorm,
    DecoderConfig,
    Gated,
    Learned,
    NoPosition,
    Parallel,
    Plain,
    PreNorm,
    Rotary,
    Sandwich,
    SelfAttention,
    SharedNorm,
    at,
)
from onward.config.routing import SoftmaxRouting
from onward.families.gpt_oss import ClampedExperts
from onward.families.stablelm import UnbiasedHeadNorms


def llama(keys: Keys, sizes: Parts) -> Parts:
    sparse, bias = keys.number("expert_count", 0), keys.has("blk.0.ffn_up.bias")
    attention = self_attention(keys, out_bias=keys.has("blk.0.attn_output.bias"))
    return plain(keys, sizes) | {
        "attention": attention,
        "mlp": experts(keys, renormalize=True) if sparse else Gated(bias=bias),
    }


def plain(keys: Keys, sizes: Parts) -> Parts:
    """What every Llama sets; the architectures that resemble Llama change some of it."""
    return rms(keys) | {"position": rotary(keys, sizes), "attention": self_attention(keys), "mlp": Gated()}


def qwen2(keys: Keys, sizes: Parts) -> Parts:
    return plain(keys, sizes) | {"head_bias": keys.has("output.bias")}


def qwen3(keys: Keys, sizes: Parts) -> Parts:
    return plain(keys, sizes) | {"attention": self_attention(keys, qk_norm="head")}


def qwen2moe(keys: Keys, sizes: Parts) -> Parts:
    shared = keys.number("expert_shared_feed_forward_length", 0)
    return plain(keys, sizes) | {"mlp": experts(keys, False, d_shared=shared, shared_gate=True)}


def qwen3moe(keys: Keys, sizes: Parts) -> Parts:
    return qwen3(keys, sizes) | {"mlp": experts(keys, True)}


def gemma(keys: Keys, sizes: Parts) -> Parts:
    parts = plain(keys, sizes) | rms(keys, offset=1.0)
    return parts | {"mlp": Gated("gelu_tanh"), "embed_scale": sizes["d_model"] ** 0.5}


def gemma_layers(keys: Keys, sizes: Parts, largest: int, period: int, window: int, **changes: Any) -> Parts:
    """Norms before and after attention and feed-forward, and sliding windows in all layers but every `period`-th. A
    model of `largest` layers scales its attention scores by its width divided by its heads."""
    plain = sizes["n_layers"] != largest
    part = self_attention(keys, scale=None if plain else (sizes["d_model"] // sizes["n_heads"]) ** -0.5, **changes)
    layers = windowed(keys, part, period, sizes["n_layers"], window)
    return gemma(keys, sizes) | {"attention": layers, "block": Sandwich()}


def gemma2(keys: Keys, sizes: Parts) -> Parts:
    cap = keys.number("attn_logit_softcapping", 50.0)
    parts = gemma_layers(keys, sizes, 46, 2, 4096, attn_softcap=cap)
    return parts | {"logit_softcap": keys.number("final_logit_softcapping", 30.0)}


def gemma2_keys(c: DecoderConfig) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": getattr(at(c.attention, 0), "attn_softcap", None)}
    caps |= {"final_logit_softcapping": c.logit_softcap}
    return window_keys(c) | {key: cap for key, cap in caps.items() if cap}


def gemma3(keys: Keys, sizes: Parts) -> Parts:
    parts = gemma_layers(keys, sizes, 62, 6, 0, qk_norm="head")
    unlimited = rotary(keys, sizes)
    local = Rotary(keys.number("rope.freq_base_swa", 10_000.0))
    position = tuple(local if part.window else unlimited for part in parts["attention"])
    return parts | {"position": position, "logit_softcap": keys.number("final_logit_softcapping", 0.0) or None}


def gemma3_keys(c: DecoderConfig) -> dict[str, Any]:
    local = [at(c.position, layer) for layer in range(c.n_layers) if at(c.attention, layer).window]
    theta = {"rope.freq_base_swa": local[0].theta} if local and isinstance(local[0], Rotary) else {}
    return gemma2_keys(c) | theta


def gpt2(keys: Keys, sizes: Parts) -> Parts:
    return layer_norm(keys) | {"position": Learned(), "attention": BIASED, "mlp": Plain("gelu_tanh", True)}


def phi2(keys: Keys, sizes: Parts) -> Parts:
    attention = self_attention(keys, out_bias=True)
    parts = layer_norm(keys) | {"position": rotary(keys, sizes), "attention": attention, "mlp": TANH}
    return parts | {"block": SharedNorm(), "head_bias": True}


def neox(keys: Keys, sizes: Parts) -> Parts:
    block = Parallel() if keys.get("use_parallel_residual") else PreNorm()
    return layer_norm(keys) | {"position": rotary(keys, sizes), "attention": BIASED, "mlp": TANH, "block": block}


def neox_keys(c: DecoderConfig) -> dict[str, Any]:
    return {"use_parallel_residual": isinstance(c.block, Parallel)}


def falcon(keys: Keys, sizes: Parts) -> Parts:
    block = Parallel() if keys.has("blk.0.attn_norm_2.weight") else SharedNorm()
    parts = layer_norm(keys) | {"position": rotary(keys, sizes), "attention": SelfAttention()}
    return parts | {"mlp": Plain("gelu_tanh"), "block": block}


def falcon_keys(c: DecoderConfig) -> dict[str, Any]:
    return {"tensor_data_layout": "jploski"}  # queries, keys and values one after the other


def falcon_layer(c: DecoderConfig) -> dict[str, str]:
    """In a layer with two norms, the file's second norm is the one before attention."""
    two = {"attn_norm": "mlp_norm", "attn_norm_2": "attn_norm", "ffn_norm": ""}
    return two if isinstance(c.block, Parallel) else {}


def bloom(keys: Keys, sizes: Parts) -> Parts:
    norm = layer_norm(keys)
    return norm | {"position": Alibi(), "attention": BIASED, "mlp": TANH, "embed_norm": norm["norm"]}


def mpt(keys: Keys, sizes: Parts) -> Parts:
    steepness, clip = keys.number("attention.max_alibi_bias", 0.0), keys.number("attention.clamp_kqv", 0.0)
    other = Learned() if keys.has("position_embd.weight") else NoPosition()
    out_bias = keys.has("blk.0.attn_output.bias")
    return layer_norm(keys, bias=keys.has("output_norm.bias")) | {
        "position": Alibi(steepness) if steepness else other,
        "attention": self_attention(keys, out_bias=out_bias, clip=clip or None),
        "mlp": Plain("gelu_tanh", keys.has("blk.0.ffn_up.bias")),
    }


def mpt_keys(c: DecoderConfig) -> dict[str, Any]:
    position, clip = at(c.position, 0), getattr(at(c.attention, 0), "clip", None)
    alibi = {"attention.max_alibi_bias": position.steepness} if isinstance(position, Alibi) else {}
    return alibi | ({"attention.clamp_kqv": clip} if clip else {})


def same_epsilon(c: DecoderConfig) -> dict[str, Any]:
    """The epsilon of the LayerNorm under the key for RMSNorm, which the reference converter writes too."""
    return {"attention.layer_norm_rms_epsilon": getattr(at(c.norm, 0), "eps", 0.0)}


def starcoder2(keys: Keys, sizes: Parts) -> Parts:
    return layer_norm(keys) | {"position": rotary(keys, sizes), "attention": BIASED, "mlp": TANH}


def stablelm(keys: Keys, sizes: Parts) -> Parts:
    block = PreNorm() if keys.has("blk.0.ffn_norm.weight") else SharedNorm()
    attention = self_attention(keys)
    if keys.has("blk.0.attn_q_norm.weight"):
        attention = UnbiasedHeadNorms(qk_norm="heads", bias=attention.bias)
    parts = layer_norm(keys) | {"position": rotary(keys, sizes), "attention": attention}
    return parts | {"mlp": Gated(), "block": block}


def stablelm_keys(c: DecoderConfig) -> dict[str, Any]:
    return {"use_parallel_residual": isinstance(at(c.block, 0), SharedNorm)}


def olmo2(keys: Keys, sizes: Parts) -> Parts:
    if keys.number("attention.sliding_window", 0):
        raise UserError("attention.sliding_window is for Olmo 3, which Onward does not read")
    return plain(keys, sizes) | {"attention": self_attention(keys, qk_norm="width"), "block": BranchNorm()}


def command_r(keys: Keys, sizes: Parts) -> Parts:
    attention = self_attention(keys, qk_norm="heads" if sizes["n_layers"] >= 64 else "none")
    parts = layer_norm(keys, bias=False) | {"position": rotary(keys, sizes), "attention": attention}
    return parts | {"mlp": Gated(), "block": SharedNorm(), "logit_scale": keys.number("logit_scale", 0.0) or 1.0}


def command_r_keys(c: DecoderConfig) -> dict[str, Any]:
    return {"logit_scale": c.logit_scale, "rope.scaling.type": "none"} | same_epsilon(c)


def granite(keys: Keys, sizes: Parts) -> Parts:
    parts = llama(keys, sizes)
    return parts | {
        "attention": replace(parts["attention"], scale=keys.number("attention.scale", 0.0) or None),
        "embed_scale": keys.number("embedding_scale", 0.0) or 1.0,
        "block": PreNorm(keys.number("residual_scale", 0.0) or 1.0),
        "logit_scale": 1 / keys.number("logit_scale"),
    }


def granite_keys(c: DecoderConfig) -> dict[str, Any]:
    scale = getattr(at(c.attention, 0), "scale", None) or at(c.attention, 0).heads(c).d_head ** -0.5
    own = {"attention.scale": scale, "embedding_scale": c.embed_scale, "logit_scale": 1 / c.logit_scale}
    return own | {"residual_scale": getattr(at(c.block, 0), "residual_scale", 1.0)} | expert_keys(c)


def smollm3(keys: Keys, sizes: Parts) -> Parts:
    rotated = rotary(keys, sizes)
    layers = tuple(rotated if (layer + 1) % 4 else NoPosition() for layer in range(sizes["n_layers"]))
    return plain(keys, sizes) | {"position": layers}


def gpt_oss(keys: Keys, sizes: Parts) -> Parts:
    mixture = experts(keys, True)
    router = SoftmaxRouting(scale=mixture.router.scale, bias=True)
    mlp = ClampedExperts(mixture.count, mixture.top_k, mixture.d_ff, router, bias=True)
    part = SelfAttention(bias=True, out_bias=True, sinks=True)
    layers = windowed(keys, part, 2, sizes["n_layers"], keys.number("attention.sliding_window"))
    return plain(keys, sizes) | {"attention": layers, "mlp": mlp}


def gpt_oss_layer(c: DecoderConfig) -> dict[str, str]:
    return {"post_attention_norm": "mlp_norm", "ffn_norm": ""}


def gpt_oss_keys(c: DecoderConfig) -> dict[str, Any]:
    return window_keys(c) | expert_keys(c)


BIASED = SelfAttention(bias=True, out_bias=True)
TANH = Plain("gelu_tanh", True)
ARCHITECTURES = {
    kind.name: kind
    for kind in (
        Architecture("llama", ("llama", "mistral", "mixtral"), llama, expert_keys, interleaved=True, free_heads=True),
        Architecture("qwen2", ("qwen2",), qwen2),
        Architecture("qwen3", ("qwen3",), qwen3, free_heads=True),
        Architecture("qwen2moe", ("qwen2_moe",), qwen2moe, expert_keys, head="required"),
        Architecture("qwen3moe", ("qwen3_moe",), qwen3moe, expert_keys, free_heads=True),
        Architecture("gemma", ("gemma",), gemma, head="absent", shift=1.0, free_heads=True),
        Architecture("gemma2", ("gemma2",), gemma2, gemma2_keys, head="absent", shift=1.0, free_heads=True),
        Architecture("gemma3", ("gemma3_text",), gemma3, gemma3_keys, shift=1.0, free_heads=True),
        Architecture("gpt2", ("gpt2",), gpt2, fused=True),
        Architecture("phi2", ("phi",), phi2, head="required", partial=True),
        Architecture("phi3", ("phi3",), plain, fused=True, fused_gate=True, partial=True),
        Architecture("gptneox", ("gpt_neox",), neox, neox_keys, fused=True, head="required", partial=True),
        Architecture("falcon", ("falcon",), falcon, falcon_keys, layer=falcon_layer, fused=True),
        Architecture("bloom", ("bloom",), bloom, fused=True),
        Architecture("mpt", ("mpt",), mpt, mpt_keys, fused=True),
        Architecture("starcoder2", ("starcoder2",), starcoder2, same_epsilon),
        Architecture("stablelm", ("stablelm",), stablelm, stablelm_keys, head="required", partial=True),
        Architecture("olmo2", ("olmo2",), olmo2, head="required"),
        Architecture("command-r", ("cohere",), command_r, command_r_keys, interleaved=True, head="absent"),
        Architecture("granite", ("granite",), granite, granite_keys, interleaved=True, free_heads=True),
        LatentArchitecture("deepseek2", ("deepseek_v2", "deepseek_v3"), deepseek2, deepseek2_keys, layer=latent_layer),
        Architecture(
            "gpt-oss", ("gpt_oss",), gpt_oss, gpt_oss_keys, head="required", free_heads=True, layer=gpt_oss_layer
        ),
        Architecture("smollm3", ("smollm3",), smollm3, interleaved=True, free_heads=True),
    )
}


def architecture(header: Header) -> Architecture:
    name = header.architecture
    if name not in ARCHITECTURES:
        raise UserError(
            f"{header.path} is of architecture {name!r:.60}, which Onward does not read: {nearest(name, ARCHITECTURES)}"
        )
    kind = ARCHITECTURES[name]
    return replace(kind, fused=True) if "blk.0.attn_qkv.weight" in header.tensors else kind
