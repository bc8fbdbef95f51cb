"""The table of llama.cpp's architectures: the decoder that the keys and tensors of a GGUF file describe, and the names
of these keys and tensors.

Each architecture is a value of ARCHITECTURES and is used for reading and for writing. A model is written in an
architecture only if `config`, applied to the written keys, returns the model's own config, except for differences that
the user accepts; this comparison includes whatever llama.cpp fixes without a key. `config` describes the computation of
llama.cpp (src/models/*.cpp), not that of the published model, where the two differ: GELU is the tanh form everywhere,
and windows are ignored in llama, qwen2, starcoder2 and phi3.

For each architecture, NAME(keys, sizes) reads the fields of DecoderConfig from a file's keys, except for the `sizes`,
which are already read; NAME_keys returns the keys for a decoder, and NAME_layer the tensor names that differ from
LAYER.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.base.fields import nearest
from onward.checkpoint.gguf import (
    dense,
    gemma3n,
    gemma4,
    indexed,
    latent,
    layered,
    mamba,
    muse_glimmer,
    recurrent,
    sparse,
    step35,
)
from onward.checkpoint.gguf.architecture import (
    Architecture,
    Parts,
    layer_norm,
    rms,
    self_attention,
    window_keys,
    windowed,
)
from onward.checkpoint.gguf.dense import BIASED, plain, qwen2, qwen3, same_epsilon
from onward.checkpoint.gguf.header import Header
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.rope import LONG, SHORT, rotary
from onward.checkpoint.gguf.unread import UNREAD
from onward.config.decoder import (
    Alibi,
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


def gemma(keys: Keys, sizes: Parts) -> Parts:
    parts = plain(keys, sizes) | rms(keys, offset=1.0)
    return parts | {"mlp": Gated("gelu_tanh"), "embed_scale": sizes["d_model"] ** 0.5}


def gemma_layers(keys: Keys, sizes: Parts, largest: int, period: int, window: int, **changes: Any) -> Parts:
    """Norms before and after attention and feed-forward, and sliding windows in all layers but every `period`-th. In a
    model with `largest` layers, the scale of attention scores is (d_model / n_heads) ** -0.5."""
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


def starcoder2(keys: Keys, sizes: Parts) -> Parts:
    return layer_norm(keys) | {"position": rotary(keys, sizes), "attention": BIASED, "mlp": TANH}


def stablelm(keys: Keys, sizes: Parts) -> Parts:
    block = PreNorm() if keys.has("blk.0.ffn_norm.weight") else SharedNorm()
    attention, norm = self_attention(keys), layer_norm(keys)
    if keys.has("blk.0.attn_q_norm.weight"):
        attention = replace(attention, qk_norm="heads", qk_norm_part=replace(norm["norm"], bias=False))
    return norm | {"position": rotary(keys, sizes), "attention": attention, "mlp": Gated(), "block": block}


def stablelm_keys(c: DecoderConfig) -> dict[str, Any]:
    return {"use_parallel_residual": isinstance(at(c.block, 0), SharedNorm)}


TANH = Plain("gelu_tanh", True)
OTHERS = (
    Architecture("qwen2", ("qwen2",), qwen2),
    Architecture("qwen3", ("qwen3",), qwen3, free_heads=True),
    Architecture("gemma", ("gemma",), gemma, head="absent", shift=1.0, free_heads=True),
    Architecture("gemma2", ("gemma2",), gemma2, gemma2_keys, head="absent", shift=1.0, free_heads=True),
    Architecture("gemma3", ("gemma3_text",), gemma3, gemma3_keys, shift=1.0, free_heads=True),
    Architecture("gpt2", ("gpt2", "gpt-sw3"), gpt2, fused=True),
    Architecture("phi2", ("phi",), phi2, head="required", partial=True),
    Architecture("phi3", ("phi3",), plain, fused=True, fused_gate=True, partial=True, factors=(LONG, SHORT)),
    Architecture("gptneox", ("gpt_neox",), neox, neox_keys, fused=True, head="required", partial=True),
    Architecture("falcon", ("falcon",), falcon, falcon_keys, layer=falcon_layer, fused=True),
    Architecture("bloom", ("bloom",), bloom, fused=True),
    Architecture("mpt", ("mpt",), mpt, mpt_keys, fused=True),
    Architecture("starcoder2", ("starcoder2",), starcoder2, same_epsilon),
    Architecture("stablelm", ("stablelm",), stablelm, stablelm_keys, head="required", partial=True),
)
FIRST = "llama", "qwen2", "qwen3", "gpt2", "deepseek2", "qwen3moe"  # tried next, after those of the model's family
SEEING = {  # decoders of models that also take images -> the architecture that computes the same for text
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3moe",
    "paddleocr": "ernie4_5",
    "hunyuan_vl": "hunyuan-dense",
}
EVERY = (
    *dense.ALL,
    *OTHERS,
    *sparse.ALL,
    *recurrent.ALL,
    *mamba.ALL,
    *gemma3n.ALL,
    *gemma4.ALL,
    *layered.ALL,
    *latent.ALL,
    *indexed.ALL,
    *step35.ALL,
    *muse_glimmer.ALL,
)
ARCHITECTURES = {kind.name: kind for kind in sorted(EVERY, key=lambda kind: kind.name not in FIRST)}


def architecture(header: Header) -> Architecture:
    own = header.architecture
    name = SEEING.get(own, own)
    if name not in ARCHITECTURES:
        why = f", because {UNREAD[name]}" if name in UNREAD else f": {nearest(name, [*ARCHITECTURES, *SEEING])}"
        raise UserError(f"{header.path} is of architecture {name!r:.60}, which Onward does not read{why}")
    kind = ARCHITECTURES[name]
    if any(header.keys.get(f"{own}.rope.dimension_sections") or ()):
        kind = replace(kind, interleaved=False)  # rotary positions with sections pair the halves of a head
    return replace(kind, fused=True) if "blk.0.attn_qkv.weight" in header.tensors else kind
