"""Gemma 3n in GGUF: several residual streams, embeddings in each layer, shared keys and values, sparse feed-forwards.
See architectures.py.

llama.cpp does not read the sizes of these parts from the file: it uses those of the published models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import Architecture, Parts, rms, self_attention, strictly_windowed
from onward.checkpoint.gguf.gemma4 import INPUTS, MODEL_INPUTS, Gemma4Architecture
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.layered import local_theta, pattern_keys
from onward.checkpoint.gguf.rope import rotary, unscaled
from onward.checkpoint.names import joined, same
from onward.config.decoder import DecoderConfig, Gated, SelfAttention, at
from onward.families import Fix, Row, linear
from onward.families.gemma3n_text import AltUpBlock, SparseGated

SIZES = {  # key in the file -> field of AltUpBlock
    "altup.num_inputs": "streams",
    "altup.active_idx": "active",
    "embedding_length_per_layer_input": "d_input",
}
BLOCK = AltUpBlock()  # its default sizes are those of llama.cpp
WITH_KEYS = 20  # number of layers, from the first on, that compute their own keys and values
SPARSE = 10  # number of layers, from the first on, with sparse feed-forwards
# units above mean + DEVIATIONS * standard deviation are active: the 0.95 quantile of a normal distribution
DEVIATIONS = 1.6448533535003662
CAP = 30.0  # soft cap of the logits
NEAR = 2e-4  # tolerance in standard deviations: below the error of llama.cpp's fp16 table for GELU
OWN = {
    "altup_correct_coef": "altup.correct",
    "altup_predict_coef": "altup.predict",
    "altup_router": "altup.router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "low_rank.0",
    "laurel_r": "low_rank.1",
    "laurel_post_norm": "low_rank_norm",
}
TABLE = "per_layer_token_embd.weight"


@dataclass(frozen=True)
class Gemma3nArchitecture(Architecture):
    IGNORED = Gemma4Architecture.IGNORED

    def names(self, c: DecoderConfig) -> Iterator[Row]:
        yield from super().names(c)
        for their, our in MODEL_INPUTS.items():
            if f"per_layer_{their}.weight" != TABLE:
                yield from linear(f"per_layer_{their}", f"layer_inputs.{our}")
        yield TABLE, "layer_inputs.embed.weight", every_token(c)
        streams = range(max(1, getattr(at(c.block, 0), "streams", 2) - 1))
        stacked: Fix = lambda t: t.flatten(0, 1), lambda t: t.unflatten(0, (len(streams), -1))
        for their, layer, our in ("altup_proj", 0, "split"), ("altup_unembd_proj", c.n_layers - 1, "merge"):
            yield f"{their}.weight", [f"blocks.{layer}.{our}.projections.{i}.weight" for i in streams], stacked
        for i in range(c.n_layers):
            for theirs, ours in (INPUTS | OWN).items():
                yield from linear(f"blk.{i}.{theirs}", f"blocks.{i}.{ours}")
            yield f"blk.{i}.altup_correct_scale.weight", f"blocks.{i}.output_scale"

    def constants(self, c: DecoderConfig) -> dict[str, Tensor]:
        """Also the key and value tensors of layers that share keys and values, which llama.cpp requires but does not
        use."""
        found, zero = super().constants(c), torch.zeros(())
        for i in range(c.n_layers):
            part = at(c.attention, i)
            if isinstance(part, SelfAttention) and part.shares_kv:
                heads = part.heads(c)
                for name in "attn_k", "attn_v":
                    found[f"blk.{i}.{name}.weight"] = zero.expand(heads.n_kv_heads * heads.d_head, c.d_model)
                found[f"blk.{i}.attn_k_norm.weight"] = zero.expand(heads.d_head)
        return found

    def folded(self, c: DecoderConfig) -> DecoderConfig:
        """The decoder with per-layer inputs for every token, and with llama.cpp's sparsity if its own is nearly
        equal."""

        def sparse(part: Any) -> Any:
            if not isinstance(part, SparseGated) or abs(deviations(part.sparsity) - cutoff(part.width(c))) > NEAR:
                return part
            return replace(part, sparsity=sparsity(part.width(c)))

        def block(part: Any) -> Any:
            return replace(part, vocab_size=c.vocab_size) if isinstance(part, AltUpBlock) else part

        layers = range(c.n_layers)
        blocks = tuple(block(at(c.block, layer)) for layer in layers)
        return replace(c, block=blocks, mlp=tuple(sparse(at(c.mlp, layer)) for layer in layers))


def deviations(share: float) -> float:
    """Convert the share of inactive units to a cutoff in standard deviations above the mean."""
    return NormalDist().inv_cdf(share)


def cutoff(width: int) -> float:
    """The cutoff of llama.cpp in standard deviations above the mean of `width` units. llama.cpp divides by width - 1 in
    the variance; the result is for a variance that divides by width."""
    return DEVIATIONS * math.sqrt(width / (width - 1))


def sparsity(width: int) -> float:
    return NormalDist().cdf(cutoff(width))


def every_token(c: DecoderConfig) -> Fix:
    """llama.cpp has per-layer inputs for every token, Gemma 3n only for most tokens: the others use those of token
    0."""
    missing = lambda t: c.vocab_size - t.size(0)
    return same, lambda t: joined([t, t[:1].expand(missing(t), -1)]) if missing(t) > 0 else t


def scales(n_layers: int) -> list[float]:
    """The cutoff of each layer in standard deviations; -infinity in layers that are not sparse."""
    return [DEVIATIONS if layer < SPARSE else -math.inf for layer in range(n_layers)]


def fixed(n_layers: int) -> dict[str, Any]:
    """Keys that llama.cpp does not read, and the constants that it uses instead."""
    return {their: getattr(BLOCK, our) for their, our in SIZES.items()} | {
        "attention.shared_kv_layers": max(0, n_layers - WITH_KEYS),
        "final_logit_softcapping": CAP,
    }


def gemma3n(keys: Keys, sizes: Parts) -> Parts:
    n, width, norm = sizes["n_layers"], sizes["d_ff"], rms(keys)["norm"]
    for key, value in fixed(n).items():
        if (found := keys.get(key, value)) != value:
            raise UserError(f"{key} is {found!r:.40}, but llama.cpp always computes this architecture with {value}")
    found = keys.by_layer("activation_sparsity_scale", n) if "activation_sparsity_scale" in keys else scales(n)
    if not all(one == other or math.isclose(one, other, rel_tol=1e-5) for one, other in zip(found, scales(n))):
        raise UserError(
            f"activation_sparsity_scale is not {DEVIATIONS:.5f} in the first {SPARSE} layers and -infinity in the "
            "others, as llama.cpp requires in this architecture"
        )
    table = keys.header.tensors.get(TABLE)
    if table is None or table.shape[0] != sizes["vocab_size"]:
        raise UserError(f"llama.cpp needs {TABLE} with as many rows as token_embd.weight in this architecture")
    part = self_attention(keys, scale=1.0, qk_norm="head")
    if part.bias and n > WITH_KEYS:
        raise UserError("llama.cpp computes no attn_q.bias in layers that share keys and values")
    layers = strictly_windowed(keys, part, 5, n)
    local = [bool(one.window) for one in layers]
    last = local[WITH_KEYS - 2 : WITH_KEYS]
    if any(last != [True, False] if one else last[1] for one in local[WITH_KEYS:]):
        raise UserError(
            f"attention.sliding_window_pattern does not match llama.cpp, in which layers from {WITH_KEYS} on share "
            f"keys and values with layer {WITH_KEYS - 2} if they have a window, otherwise with layer {WITH_KEYS - 1}"
        )
    owns = replace(norm, weight=False)
    turned = rotary(keys, sizes)
    near = unscaled(keys, 10_000.0, turned.fraction)
    sparse = SparseGated("gelu_tanh", sparsity=sparsity(width))
    return {
        "norm": norm,
        "attention": tuple(
            replace(one, value_norm=owns) if layer < WITH_KEYS else replace(one, shares_kv=True)
            for layer, one in enumerate(layers)
        ),
        "position": tuple(near if one else turned for one in local),
        "mlp": tuple(sparse if layer < SPARSE else Gated("gelu_tanh") for layer in range(n)),
        "block": tuple(
            replace(BLOCK, vocab_size=table.shape[0], splits=layer == 0, merges=layer == n - 1) for layer in range(n)
        ),
        "embed_scale": sizes["d_model"] ** 0.5,
        "logit_softcap": CAP,
    }


def gemma3n_keys(c: DecoderConfig) -> dict[str, Any]:
    sparse = {"activation_sparsity_scale": scales(c.n_layers)}
    return pattern_keys(c) | local_theta(c) | fixed(c.n_layers) | sparse


ALL = (
    Gemma3nArchitecture(
        "gemma3n",
        ("gemma3n_text",),
        gemma3n,
        gemma3n_keys,
        free_heads=True,
        partial=True,
    ),
)
