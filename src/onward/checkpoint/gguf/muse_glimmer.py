"""Muse Glimmer's text decoder in GGUF. See architectures.py.

The model normalizes queries and keys without weights, and scales their products; llama.cpp's norms have weights, and
the weights of the query norm contain the scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import Architecture, Parts, rms, self_attention, strictly_windowed
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.layered import local_theta, pattern_keys
from onward.checkpoint.gguf.rope import factors, fraction, unscaled
from onward.checkpoint.gguf.sparse import gate_of_output
from onward.config.attention_options import SigmoidGate
from onward.config.decoder import DecoderConfig, Gated, NoPosition, SelfAttention, at
from onward.families.muse_glimmer_text import MuseBlock


@dataclass(frozen=True)
class MuseGlimmerArchitecture(Architecture):
    IGNORED = rf"{Architecture.IGNORED}|\.attn_(q|k)_norm\.weight$"  # these weights contain a scale

    def constants(self, c: DecoderConfig) -> dict[str, Tensor]:
        found = super().constants(c)
        for layer in range(c.n_layers):
            part = at(c.attention, layer)
            scale = part.scale if isinstance(part, SelfAttention) else None
            weight = 1.0 if scale is None else scale * c.d_head**0.5
            found[f"blk.{layer}.attn_q_norm.weight"] = torch.full((c.d_head,), weight)
            found[f"blk.{layer}.attn_k_norm.weight"] = torch.ones(c.d_head)
        return found

    def shift_of(self, name: str) -> float:
        return 0.0 if name == "output_norm.weight" else super().shift_of(name)


def muse_glimmer(keys: Keys, sizes: Parts) -> Parts:
    width, norm = sizes["d_head"], rms(keys)["norm"]
    weightless = replace(norm, weight=False)
    part = self_attention(keys, qk_norm="head", qk_norm_part=weightless, gate=SigmoidGate())
    attention = tuple(
        replace(one, scale=constant(keys, layer, "q") * constant(keys, layer, "k") * width**-0.5)
        for layer, one in enumerate(strictly_windowed(keys, part, 4, sizes["n_layers"]))
    )
    part_of = fraction(keys.number("rope.dimension_count", width), width)
    turned = unscaled(keys, keys.number("rope.freq_base", 10_000.0), part_of)
    return {
        "norm": replace(norm, offset=1.0),
        "attention": attention,
        "position": tuple(turned if one.window else NoPosition() for one in attention),
        "mlp": Gated(),
        "block": MuseBlock(post_eps=1e-8),
        "final_norm": norm,
        "embed_norm": weightless,
        "logit_scale": keys.number("logit_scale"),
        "logit_softcap": keys.number("final_logit_softcapping", 30.0) or None,
    }


def constant(keys: Keys, layer: int, name: str) -> float:
    """The value of all weights in the norm of a layer's queries or keys."""
    tensor = f"blk.{layer}.attn_{name}_norm.weight"
    if not keys.has(tensor):
        raise UserError(f"llama.cpp needs {tensor} in this architecture")
    weights = factors(keys, tensor)
    if len({*weights}) != 1:
        raise UserError(
            f"{tensor} has different numbers, but Onward supports only one factor for all elements, as published"
        )
    return float(str(np.float32(weights[0])))  # rounded as in header.py: 3.87, not 3.869999885559082


def muse_glimmer_keys(c: DecoderConfig) -> dict[str, Any]:
    scales = {"logit_scale": c.logit_scale, "final_logit_softcapping": c.logit_softcap or 0.0}  # default: 30
    return pattern_keys(c) | local_theta(c) | scales


ALL = (
    MuseGlimmerArchitecture(
        "muse-glimmer",
        ("muse_glimmer_text",),
        muse_glimmer,
        muse_glimmer_keys,
        layer=gate_of_output,
        head="required",
        shift=1.0,
        interleaved=True,
        free_heads=True,
        partial=True,
    ),
)
