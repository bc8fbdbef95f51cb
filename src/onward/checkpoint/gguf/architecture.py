"""The architectures of llama.cpp: how a GGUF file names and stores a decoder's tensors, with readers of the keys that
architectures share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from onward.base import fields
from onward.base.errors import UserError
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.rope import FREQS, LONG, SHORT, rope_tensors
from onward.checkpoint.gguf.tensors import is_norm
from onward.checkpoint.names import joined, same, to_theirs
from onward.checkpoint.packed import Change
from onward.checkpoint.weights import StoredTensor
from onward.config.decoder import (
    DecoderConfig,
    Experts,
    LayerNorm,
    RMSNorm,
    Rotary,
    SelfAttention,
    at,
)
from onward.config.routing import SoftmaxRouting
from onward.families import Fix, Row, interleaved, linear

Parts = dict[str, Any]
LAYER = {  # GGUF's names of linear layers and norms of a block -> Onward's; `names` adds others
    "attn_norm": "attn_norm",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "attn_output": "attn.out",
    "post_attention_norm": "attn_post_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_shexp": "mlp.shared.gate",
    "ffn_up_shexp": "mlp.shared.up",
    "ffn_down_shexp": "mlp.shared.down",
    "post_ffw_norm": "mlp_post_norm",
}
FUSED = "ffn_gate_up_exps"


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp: translates between the metadata keys and tensors of a GGUF file and a decoder.

    `parts`, called with the metadata keys of a file and the sizes read from them, returns the fields of DecoderConfig
    that are not sizes; `keys` returns the metadata keys for a decoder. The other fields describe how tensors are
    stored.
    """

    name: str
    families: tuple[str, ...]  # model_types of the published models that convert to this architecture
    parts: Callable[[Keys, Parts], Parts]
    keys: Callable[[DecoderConfig], dict[str, Any]] = lambda c: {}
    fused: bool = False  # queries, keys and values are one tensor
    interleaved: bool = False  # rotary positions pair element 2 i with 2 i + 1
    head: str = "optional"  # the tensor `output`: optional, required (a copy if tied) or absent (tied)
    shift: float = 0.0  # added to the weights of norms when writing the file
    free_heads: bool = False  # the total width of the heads may differ from the model's width
    partial: bool = False  # only a part of each head may be rotated
    factors: tuple[str, ...] = ()  # tensors with factors of rotary frequencies that the architecture reads
    routing_bias: str = "exp_probs_b.bias"  # name of the tensor with the bias of a layer's router
    needs: tuple[str, ...] = ()  # tensors of the last layer without which llama.cpp does not load the file
    uneven: bool = False  # layers may have different numbers of key heads and widths of feed-forwards
    narrow: bool = False  # the width of values may differ from that of keys
    fused_gate: bool = False  # the gate and up projections are one tensor
    layer: Callable[[DecoderConfig], dict[str, str]] = lambda c: {}  # rows to replace in LAYER
    differences: tuple[
        str, ...
    ] = ()  # parts that llama.cpp computes differently; Onward computes them as the published model does
    BASE = ""
    IGNORED = r"^rope_(freqs|factors_long|factors_short)\.weight$|\.rope_freqs$|\.attn_rot_embd\.weight$"

    def config(self, keys: Keys) -> DecoderConfig:
        header = keys.header
        try:
            sizes = sizes_of(keys, self.uneven, self.narrow)
            if unread := next(
                (name for name in (FREQS, LONG, SHORT) if keys.has(name) and name not in self.factors), ""
            ):
                raise UserError(f"llama.cpp reads no {unread} in the architecture {self.name}")
            for name in (f"blk.{sizes['n_layers'] - 1}.{tensor}" for tensor in self.needs):
                if not keys.has(name):
                    raise UserError(f"llama.cpp needs {name} in the architecture {self.name}")
            if not self.free_heads:
                sizes["d_head"] = sizes["d_model"] // max(1, sizes["n_heads"])
            shape = sizes | self.parts(keys, sizes)
            if not self.partial:
                shape["position"] = whole(shape["position"])
            keys.check()
            return fields.build(DecoderConfig, fields.plain(DecoderConfig(**shape)))
        except UserError as error:
            raise error if str(header.path) in str(error) else UserError(f"{header.path}: {error}") from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{header.path} has keys that do not fit together ({error}): get the file again") from None

    def names(self, c: DecoderConfig) -> Iterator[Row]:
        """Rows (name in the file, name of Decoder's parameter, optionally functions that convert the tensor and convert
        it back), as in `onward.families.Names`."""
        yield "token_embd.weight", "embed.weight"
        yield "position_embd.weight", "position.weight"
        yield from linear("token_embd_norm", "embed_norm")
        yield from linear("output_norm", "norm")
        yield from linear("output", "head")
        layer = LAYER | self.layer(c) | ({"ffn_gate": "", "ffn_up": ""} if self.fused_gate else {})
        for i in range(c.n_layers):
            their, our = f"blk.{i}", f"blocks.{i}"
            for name, ours in layer.items():
                if ours:
                    yield from linear(f"{their}.{name}", f"{our}.{ours}")
            if self.fused_gate:
                yield f"{their}.ffn_up.weight", [f"{our}.mlp.gate.weight", f"{our}.mlp.up.weight"]
            yield from self.projections(c, i)
            yield from self.head_norms(c, i)
            if isinstance(at(c.mlp, i), Experts):
                for name in "gate", "up", "down":
                    yield f"{their}.ffn_{name}_exps.weight", f"{our}.mlp.{name}"
                    yield f"{their}.ffn_{name}_exps.bias", f"{our}.mlp.{name}_bias"
                yield f"{their}.{self.routing_bias}", f"{our}.mlp.router.routing_bias"
            yield f"{their}.attn_sinks.weight", f"{our}.attn.attend.sinks"
            share = lambda t: t[None], lambda t: t[0]  # the file stores a vector
            yield f"{their}.ffn_gate_inp_shexp.weight", f"{our}.mlp.shared.share.weight", share

    def folded(self, c: DecoderConfig) -> DecoderConfig:
        """The decoder as the file describes it, for example without the factors that the file's tensors contain."""
        return c

    def numbers(self, keys: Keys) -> dict[str, float]:
        """Parameters of one element that the file stores as metadata keys, under the names that `names` expects."""
        return {}

    def number_keys(self, c: DecoderConfig, ours: Mapping[str, Tensor]) -> dict[str, Any]:
        """The metadata keys for the parameters that `numbers` reads."""
        return {}

    def constants(self, c: DecoderConfig) -> dict[str, Tensor]:
        """Tensors of the file that are not parameters of the decoder, by default factors of rotary frequencies."""
        return rope_tensors(c)

    def shift_of(self, name: str) -> float:
        """The offset that is added to a tensor of this name when the file is written."""
        return self.shift if is_norm(name) else 0.0

    def tensors(self, c: DecoderConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for the file's tensors, one by one, from a decoder's tensors; on the meta device, they
        have shapes only."""
        yield from to_theirs(self, c, ours)

    def stored(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """A file's tensors under the names and in the shapes that `names` expects; a subclass may join tensors."""
        return dict(part for name, own in tensors.items() for part in apart(name, own))

    def projections(self, c: DecoderConfig, layer: int) -> Iterator[Row]:
        """The rows of `names` for queries, keys and values."""
        position, part = at(c.position, layer), at(c.attention, layer)
        if not isinstance(part, SelfAttention):
            return
        n_heads, n_kv_heads, d_head, _ = part.heads(c)
        rope_dim = position.rope_dim(d_head) if isinstance(position, Rotary) else d_head  # as the converter does
        if self.fused:
            rotated = (n_heads + n_kv_heads) * d_head
            both: tuple[Fix, ...] = (leading(rotated, *interleaved(d_head, rope_dim)),) if self.interleaved else ()
            yield from linear(f"blk.{layer}.attn_qkv", [f"blocks.{layer}.attn.{name}" for name in "qkv"], *both)
            return
        for name in "qkv":
            fix: tuple[Fix, ...] = (interleaved(d_head, rope_dim),) if self.interleaved and name != "v" else ()
            yield from linear(f"blk.{layer}.attn_{name}", f"blocks.{layer}.attn.{name}", *fix)

    def head_norms(self, c: DecoderConfig, layer: int) -> Iterator[Row]:
        """The rows of `names` for norms with separate weights for each head, which the file stores as one tensor (H,
        E)."""
        position = at(c.position, layer)
        n_heads, n_kv_heads, d_head, _ = at(c.attention, layer).heads(c)
        into, back = same, same
        if self.interleaved and isinstance(position, Rotary):
            into, back = interleaved(d_head, position.rope_dim(d_head))
        fix = lambda t: into(t.flatten()), lambda t: back(t).unflatten(0, (-1, d_head))
        for name, heads in ("q_norm", n_heads), ("k_norm", n_kv_heads):
            ours = [f"blocks.{layer}.attn.{name}.{head}.weight" for head in range(heads)]
            yield f"blk.{layer}.attn_{name}.weight", ours, fix


def whole(position: Any) -> Any:
    """Return a position part, or a tuple of the layers' parts, with all elements of a head rotated."""
    if isinstance(position, tuple):
        return tuple(map(whole, position))
    return replace(position, fraction=1.0) if isinstance(position, Rotary) else position


def apart(name: str, own: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yield (name, tensor) for a stored tensor. If it contains the gate and up projections of all experts, yield each
    of the two."""
    if not name.endswith(f"{FUSED}.weight"):
        yield name, own
        return
    count, width, *rest = own.shape
    for part, span in ("gate", slice(width // 2)), ("up", slice(width // 2, width)):
        rows = lambda start, end, span=span: own.rows(start, end)[:, span]
        yield name.replace(FUSED, f"ffn_{part}_exps"), StoredTensor([count, width // 2, *rest], own.dtype, rows)


def leading(rows: int, into: Change, back: Change) -> Fix:
    """Return a pair of changes that affect only the first `rows` rows of a tensor."""
    first = lambda change: lambda t: joined([change(t[:rows]), t[rows:]])
    return first(into), first(back)


def sizes_of(keys: Keys, uneven: bool = False, narrow: bool = False) -> Parts:
    """A decoder's sizes, as fields of DecoderConfig; if layers are `uneven`, those of the first layer. A value width
    that differs from the key width is an error unless `narrow`."""
    number = (lambda key, default: keys.by_layer(key, 1)[0] or default) if uneven else keys.number
    embedding = keys.header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError("the file has no matrix token_embd.weight: get it again")
    width = keys.number("embedding_length")
    heads = keys.by_layer("attention.head_count", 1)[0] if uneven else keys.number("attention.head_count")
    d_head = keys.number("attention.key_length", width // max(heads, 1))
    latent = "attention.kv_lora_rank" in keys
    if not latent and not narrow and keys.number("attention.value_length", d_head) != d_head:
        raise UserError(
            "attention.value_length is not attention.key_length, but llama.cpp requires that they are equal here"
        )
    layers = keys.number("block_count") - keys.number("nextn_predict_layers", 0)
    if layers > len(keys.header.tensors):
        raise UserError(
            f"block_count is {layers}, more than the file has tensors ({len(keys.header.tensors)}): get it again"
        )
    return {
        "vocab_size": embedding.shape[0],
        "d_model": width,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": heads if latent else number("attention.head_count_kv", heads),
        "d_head": d_head,
        "d_ff": number("feed_forward_length", 0),
        "context_length": keys.number("context_length"),
        "tied": not keys.has("output.weight"),
    }


def rms(keys: Keys, offset: float = 0.0) -> Parts:
    return {"norm": RMSNorm(eps=keys.number("attention.layer_norm_rms_epsilon"), offset=offset)}


def layer_norm(keys: Keys, bias: bool = True) -> Parts:
    return {"norm": LayerNorm(keys.number("attention.layer_norm_epsilon"), bias)}


def self_attention(keys: Keys, **changes: Any) -> SelfAttention:
    """Attention with biases of queries, keys and values if the file has them."""
    return SelfAttention(bias=keys.has("blk.0.attn_q.bias") or keys.has("blk.0.attn_qkv.bias"), **changes)


def experts(keys: Keys, renormalize: bool, **changes: Any) -> Experts:
    """A mixture of experts with softmax routing."""
    router = SoftmaxRouting(renormalize=renormalize)
    count, used = keys.number("expert_count"), keys.number("expert_used_count")
    width = keys.number("expert_feed_forward_length", 0)
    return Experts(count, used, 0 if width == keys.number("feed_forward_length", 0) else width, router, **changes)


def expert_keys(c: DecoderConfig) -> dict[str, Any]:
    part = at(c.mlp, 0)
    if not isinstance(part, Experts):
        return {}
    counts = {"expert_count": part.count, "expert_used_count": part.top_k}
    counts |= {"expert_feed_forward_length": part.width(c)}
    return counts | ({"expert_shared_feed_forward_length": part.d_shared} if part.d_shared else {})


def same_width(c: DecoderConfig) -> dict[str, Any]:
    """The keys of experts in architectures where `feed_forward_length` is the width of the experts."""
    part = at(c.mlp, 0)
    return expert_keys(c) | ({"feed_forward_length": part.width(c)} if isinstance(part, Experts) else {})


def windowed(keys: Keys, part: SelfAttention, period: int, n_layers: int, window: int) -> tuple[SelfAttention, ...]:
    """The attention of each layer: `part` with a sliding window (of `window` tokens unless the file gives a length),
    except in every `period`-th layer; a pattern of layers in the file replaces `period`."""
    pattern = keys.get("attention.sliding_window_pattern", period)
    window = keys.number("attention.sliding_window", window)
    if isinstance(pattern, int):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(n_layers)]
    if len(pattern) < n_layers:
        raise UserError(f"attention.sliding_window_pattern has {len(pattern)} of {n_layers} layers: get the file again")
    return tuple(replace(part, window=window if local else 0) for local in pattern[:n_layers])


def strictly_windowed(keys: Keys, part: SelfAttention, period: int, n_layers: int) -> tuple[SelfAttention, ...]:
    """`windowed` for architectures that llama.cpp loads only if a layer has a window."""
    layers = windowed(keys, part, period, n_layers, keys.number("attention.sliding_window"))
    if not any(one.window for one in layers):
        raise UserError("no layer has a window, but llama.cpp requires one in this architecture")
    return layers


def window_keys(c: DecoderConfig) -> dict[str, Any]:
    windows = [at(c.attention, layer).window for layer in range(c.n_layers)]
    if not any(windows):
        return {}
    local = [bool(window) for window in windows]
    return {"attention.sliding_window": max(windows), "attention.sliding_window_pattern": local}
