"""Gemma 4 in GGUF: layers of two widths, embeddings in each layer, shared keys and values, experts in addition to a
feed-forward. See architectures.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import Architecture, Parts, expert_keys, rms, self_attention, window_keys
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.rope import FREQS, UNROTATED, factors
from onward.config.decoder import DecoderConfig, Gated, RMSNorm, Rotary, SelfAttention, at
from onward.config.scaling import ProportionalScaling
from onward.families import Row, linear
from onward.families.gemma4_text import Gemma4Block, StreamExperts, StreamRouting

STREAM = {  # tensors of a layer with experts
    "ffn_norm": "mlp.shared_norm",
    "post_ffw_norm_1": "mlp.shared_post_norm",
    "pre_ffw_norm_2": "mlp.routed_norm",
    "post_ffw_norm_2": "mlp.routed_post_norm",
    **{f"ffn_{name}": f"mlp.shared.{name}" for name in ("gate", "up", "down")},
    **{f"ffn_{name}_shexp": "" for name in ("gate", "up", "down")},
}
INPUTS = {"inp_gate": "input_gate", "proj": "input_out", "post_norm": "input_norm"}
MODEL_INPUTS = {"token_embd": "embed", "model_proj": "project", "proj_norm": "norm"}


@dataclass(frozen=True)
class Gemma4Architecture(Architecture):
    IGNORED = rf"{Architecture.IGNORED}|\.attn_(k|v|k_norm)\.weight$"  # in layers that reuse keys and values

    def names(self, c: DecoderConfig) -> Iterator[Row]:
        yield from super().names(c)
        for their, our in MODEL_INPUTS.items():
            yield from linear(f"per_layer_{their}", f"layer_inputs.{our}")
        for i in range(c.n_layers):
            their, our = f"blk.{i}", f"blocks.{i}"
            for theirs, ours in INPUTS.items():
                yield from linear(f"{their}.{theirs}", f"{our}.{ours}")
            yield f"{their}.layer_output_scale.weight", f"{our}.factor"
            yield f"{their}.ffn_gate_inp.scale", f"{our}.mlp.router.scale"
            yield f"{their}.ffn_down_exps.scale", f"{our}.mlp.router.expert_scale"


def gemma4_layer(c: DecoderConfig) -> dict[str, str]:
    return STREAM if isinstance(at(c.mlp, 0), StreamExperts) else {}


def gemma4(keys: Keys, sizes: Parts) -> Parts:
    layers, eps = sizes["n_layers"], keys.number("attention.layer_norm_rms_epsilon")
    local = keys.by_layer("attention.sliding_window_pattern", layers)
    heads, widths = (keys.by_layer(key, layers) for key in ("attention.head_count_kv", "feed_forward_length"))
    first_shared = layers - keys.number("attention.shared_kv_layers", 0)
    if first_shared < layers and [*map(bool, local[first_shared - 2 : first_shared])] != [True, False]:
        raise UserError(
            "llama.cpp requires that, of the last two layers before those that share keys, the first has a "
            "window and the second has none"
        )
    d_head, wide, window = (
        keys.number(f"attention.{key}") for key in ("key_length_swa", "key_length", "sliding_window")
    )
    keys.number("attention.value_length_swa", d_head)
    part = self_attention(keys, qk_norm="head", scale=1.0)

    def attention(layer: int) -> SelfAttention:
        shares, own = layer >= first_shared, replace(part, n_kv_heads=heads[layer], d_head=d_head, window=window)
        return replace(
            own if local[layer] else replace(own, window=0, d_head=wide),
            values_are_keys=not shares and not keys.has(f"blk.{layer}.attn_v.weight"),
            value_norm=None if shares else RMSNorm(eps, weight=False),
            shares_kv=shares,
        )

    def feed_forward(layer: int) -> Gated | StreamExperts:
        if not keys.number("expert_count", 0):
            return Gated("gelu_tanh", d_ff=widths[layer])
        return StreamExperts(
            keys.number("expert_count"),
            keys.number("expert_used_count"),
            keys.number("expert_feed_forward_length"),
            StreamRouting(eps=eps),
            d_shared=widths[layer],
            act="gelu_tanh",
        )

    listed = factors(keys, FREQS) if keys.has(FREQS) else (1.0,) * (wide // 2)
    rotated = sum(one < UNROTATED / 2 for one in listed)
    scaling = ProportionalScaling(rotated / len(listed), keys.number("rope.scaling.factor", 1.0) or 1.0)
    full = Rotary(keys.number("rope.freq_base", 10_000.0), scaling=scaling)
    part_of = keys.number("rope.dimension_count_swa", d_head) / d_head
    small = Rotary(keys.number("rope.freq_base_swa", 10_000.0), part_of)
    width = keys.number("embedding_length_per_layer_input")
    table = keys.header.tensors.get("per_layer_token_embd.weight")
    return rms(keys) | {
        "d_head": d_head,
        "attention": tuple(map(attention, range(layers))),
        "position": tuple(small if one else full for one in local),
        "mlp": tuple(map(feed_forward, range(layers))),
        "block": Gemma4Block(d_input=width, vocab_size=table.shape[0] if table and width else 0),
        "embed_scale": sizes["d_model"] ** 0.5,
        "logit_softcap": keys.number("final_logit_softcapping", 30.0) or None,
    }


def gemma4_keys(c: DecoderConfig) -> dict[str, Any]:
    parts = [part for i in range(c.n_layers) if isinstance(part := at(c.attention, i), SelfAttention)]
    block, mlps = at(c.block, 0), [at(c.mlp, layer) for layer in range(c.n_layers)]
    wide, small = (next((p.heads(c).d_head for p in parts if bool(p.window) == local), c.d_head) for local in (0, 1))
    position = next((p for i, p in enumerate(parts) if p.window and isinstance(at(c.position, i), Rotary)), None)
    local = at(c.position, parts.index(position)) if position else None
    own: dict[str, Any] = {
        "attention.head_count_kv": [part.heads(c).n_kv_heads for part in parts],
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": small,
        "attention.value_length_swa": small,
        "attention.shared_kv_layers": sum(part.shares_kv for part in parts),
        "embedding_length_per_layer_input": getattr(block, "d_input", 0),
        "feed_forward_length": [getattr(mlp, "d_shared", 0) or mlp.width(c) for mlp in mlps if hasattr(mlp, "width")],
        "rope.dimension_count": wide,
    }
    if isinstance(local, Rotary):
        own |= {"rope.dimension_count_swa": local.rope_dim(small), "rope.freq_base_swa": local.theta}
    scaling = getattr(at(c.position, c.n_layers - 1), "scaling", None)
    if isinstance(scaling, ProportionalScaling) and scaling.factor != 1.0:
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
    cap = {"final_logit_softcapping": c.logit_softcap or 0.0}  # without this key, llama.cpp uses 30
    return window_keys(c) | expert_keys(c) | own | cap


ALL = (
    Gemma4Architecture(
        "gemma4",
        ("gemma4_text", "gemma4_unified_text"),
        gemma4,
        gemma4_keys,
        free_heads=True,
        partial=True,
        layer=gemma4_layer,
        factors=(FREQS,),
        uneven=True,
    ),
)
