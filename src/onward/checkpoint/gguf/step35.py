"""Step 3.5 in GGUF: heads, windows, experts and limits of hidden units by layer. See architectures.py.

In the layers without a window, llama.cpp rotates `rope.dimension_count` / 2 elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import Architecture, Parts, rms, self_attention, strictly_windowed
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.layered import a_mixture, local_theta, pattern_keys
from onward.checkpoint.gguf.rope import FREQS, LONG, SHORT, fraction, scaling, unscaled
from onward.checkpoint.gguf.sparse import SIGMOID, gate_of_output, mixture, routed_keys
from onward.config.attention_options import SigmoidGate
from onward.config.decoder import DecoderConfig, Experts, Gated, Rotary, SelfAttention, at
from onward.families.step3p5 import LimitedExperts, LimitedGated, limits_of

LIMITS = "swiglu_clamp_exp", "swiglu_clamp_shexp"  # limits of the hidden units of experts, and of other feed-forwards
LEAST = 1e-6  # llama.cpp ignores limits up to this value


@dataclass(frozen=True)
class Step35Architecture(Architecture):
    def constants(self, c: DecoderConfig) -> dict[str, Tensor]:
        """Factors of rotary frequencies, for the largest number of pairs that a layer rotates."""
        found = super().constants(c)
        turns = [(at(c.position, i), at(c.attention, i).rope_width(c)) for i in range(c.n_layers)]
        pairs = max((turn.rope_dim(width) // 2 for turn, width in turns if isinstance(turn, Rotary)), default=0)
        return {name: pad(factors, (0, pairs - len(factors)), value=1.0) for name, factors in found.items()}


def step35(keys: Keys, sizes: Parts) -> Parts:
    layers, width = range(sizes["n_layers"]), sizes["d_head"]
    if not isinstance(keys.get("attention.sliding_window_pattern"), list):
        raise UserError("attention.sliding_window_pattern is not a list, as llama.cpp requires in this architecture")
    part = self_attention(keys)
    heads, kv_heads = (keys.by_layer(f"attention.{key}", len(layers)) for key in ("head_count", "head_count_kv"))
    attention = tuple(
        replace(
            one,
            n_heads=heads[i],
            n_kv_heads=kv_heads[i] or heads[i],
            qk_norm="head" if keys.has(f"blk.{i}.attn_q_norm.weight") else "none",
            gate=SigmoidGate("head") if keys.has(f"blk.{i}.attn_gate.weight") else None,
        )
        for i, one in enumerate(strictly_windowed(keys, part, 0, len(layers)))
    )
    count, theta = keys.number("rope.dimension_count", width), keys.number("rope.freq_base", 10_000.0)
    part_of = fraction(keys.number("rope.dimension_count_swa", count), width)
    near = unscaled(keys, 10_000.0, part_of)
    far = Rotary(theta, fraction(count // 2, width), scaling(keys, theta, sizes["context_length"], count // 2))
    for key in "leading_dense_block_count", "moe_every_n_layers":  # unused: the tensors show which layers have experts
        keys.get(key)
    return rms(keys, offset=1.0) | {
        "attention": attention,
        "position": tuple(near if one.window else far for one in attention),
        "mlp": feed_forwards(keys, layers),
    }


def feed_forwards(keys: Keys, layers: Sequence[int]) -> tuple[Gated | Experts, ...]:
    limits = [[0.0] * len(layers) if keys.get(key) is None else keys.by_layer(key, len(layers)) for key in LIMITS]
    parts = list[Gated | Experts]()
    for layer, limit, other in zip(layers, *([max(0.0, x) * (x > LEAST) for x in values] for values in limits)):
        if not keys.has(f"blk.{layer}.ffn_gate_inp.weight"):
            parts.append(LimitedGated(limit=other) if other else Gated())
            continue
        if not keys.has(f"blk.{layer}.ffn_up_shexp.weight"):
            raise UserError(f"llama.cpp computes no experts without the tensor blk.{layer}.ffn_up_shexp.weight")
        many = mixture(keys, layer, SIGMOID)
        own = {name: getattr(many, name) for name in ("count", "top_k", "d_ff", "router", "d_shared")}
        parts.append(LimitedExperts(**own, limit=limit, shared_limit=other) if limit or other else many)
    return tuple(parts)


def step35_keys(c: DecoderConfig) -> dict[str, Any]:
    layers = range(c.n_layers)
    parts = [part for i in layers if isinstance(part := at(c.attention, i), SelfAttention)]
    mlps = [mlp for i in layers if isinstance(mlp := at(c.mlp, i), (Gated, Experts))]
    if len(parts) < c.n_layers or len(mlps) < c.n_layers:
        return {}
    heads, many = [part.heads(c) for part in parts], a_mixture(c)
    turns = {bool(part.window): turn for i, part in enumerate(parts) if isinstance(turn := at(c.position, i), Rotary)}
    near, far = turns.get(True), turns.get(False)
    return (
        routed_keys(replace(c, mlp=many) if many else c)
        | pattern_keys(c)
        | local_theta(c)
        | ({"rope.dimension_count": 2 * far.rope_dim(c.d_head)} if far else {})
        | ({"rope.dimension_count_swa": near.rope_dim(c.d_head)} if near else {})
        | {key: [*values] for key, values in zip(LIMITS, zip(*map(limits_of, mlps)))}
        | {
            "attention.head_count": [one.n_heads for one in heads],
            "attention.head_count_kv": [one.n_kv_heads for one in heads],
            "leading_dense_block_count": mlps.index(many) if many else c.n_layers,
        }
    )


ALL = (
    Step35Architecture(
        "step35",
        ("step3p5",),
        step35,
        step35_keys,
        layer=gate_of_output,
        head="required",
        shift=1.0,
        free_heads=True,
        partial=True,
        uneven=True,
        factors=(FREQS, LONG, SHORT),
    ),
)
