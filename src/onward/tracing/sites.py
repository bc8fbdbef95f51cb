"""The activations of a decoder by name, and the hooks that reach each of them.

Shapes: B batch, T tokens in this call, S keys, D d_model, H heads, K key/value heads, E d_head, F width of a value or
feed-forward units, X experts, A experts per token, N = B T, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onward.config.decoder import at
from onward.model.attention import Attend, SelfAttentionModule
from onward.model.decoder import Decoder
from onward.model.experts import ExpertsModule
from onward.model.feedforward import GatedFeedForwardModule, PlainFeedForwardModule
from onward.model.latent import LatentAttentionModule
from onward.model.norms import LayerNormModule, RMSNormModule
from onward.model.positions import rotates
from onward.tracing.attention import tap_attend, tap_context, tap_latent, tap_query
from onward.tracing.experts import check_rows, tap_experts
from onward.tracing.taps import Activation, Taps


@dataclass(frozen=True, eq=False)
class ModuleSite:
    """Hooks on the input or the output of a module.

    `heads` > 0 splits the last dimension into heads. `outer` is the module whose input still has the dimensions (B, T)
    where those of this one are flat.
    """

    name: str
    module: nn.Module
    of_input: bool = False
    axis: int | None = None
    heads: int = 0
    outer: nn.Module | None = None

    def __call__(self, taps: Taps) -> Iterator[RemovableHandle]:
        state = local()  # of one thread: another may be in the same module

        def note(outer: nn.Module, inputs: tuple[Any, ...]) -> None:
            check_rows(outer)
            state.leading = inputs[0].shape[:-1]

        def visited(tensor: Tensor) -> Tensor | None:
            value = tensor
            if self.heads:
                value = tensor.unflatten(-1, (self.heads, -1))
            elif self.outer is not None:
                value = tensor.unflatten(0, state.leading)
            new = taps.visit(self.name, value, self.axis)
            if new is tensor or (new is value and not taps.gradients(self.name)):
                return None
            return new.view_as(tensor)  # a gradient that is kept passes through the reshaped tensor

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            new = visited(inputs[0])
            return None if new is None else (new, *inputs[1:])

        def after(_: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
            return visited(output)

        if self.outer is not None:
            yield taps.before(self.outer, note, self.name)
        if self.of_input:
            yield taps.before(self.module, before, self.name)
        else:
            yield taps.after(self.module, after, self.name)


@dataclass(frozen=True, eq=False)
class MidSite:
    """The residual stream between attention and feed-forward. The feed-forward reads it, and its output is added to it:
    an edit changes the one, and adds the difference to the other."""

    name: str
    block: nn.Module
    reader: str  # the submodule that reads it
    sum_at: str  # the submodule whose input is the sum; "": the sum is the output of the block

    def __call__(self, taps: Taps) -> Iterator[RemovableHandle]:
        state = local()

        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            new = taps.visit(self.name, inputs[0])
            state.difference = None if new is inputs[0] else new - inputs[0]
            return new, *inputs[1:]

        def added(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            return None if state.difference is None else (inputs[0] + state.difference, *inputs[1:])

        def after(_: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
            return None if state.difference is None else output + state.difference

        yield taps.before(self.block.get_submodule(self.reader), before, self.name)
        if self.sum_at:
            yield taps.before(self.block.get_submodule(self.sum_at), added, self.name)
        else:
            yield taps.after(self.block, after, self.name)


@dataclass(frozen=True, eq=False)
class ScaleSite:
    """The number by which a norm divides each vector, (..., 1), computed beside the norm."""

    name: str
    module: LayerNormModule | RMSNormModule

    def __call__(self, taps: Taps) -> Iterator[RemovableHandle]:
        @torch.no_grad()
        def scale(_: nn.Module, inputs: tuple[Tensor]) -> None:
            taps.visit(self.name, norm_scale(self.module, inputs[0]))

        yield taps.before(self.module, scale, self.name)


def norm_scale(norm: LayerNormModule | RMSNormModule, x: Tensor) -> Tensor:
    """The number by which a norm divides each vector of x (..., D), (..., 1): the root of its mean square (RMSNorm) or
    of its variance (LayerNorm), plus eps."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if isinstance(norm, LayerNormModule):
        x = x - x.mean(-1, keepdim=True)
    return (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def activations(model: Decoder) -> dict[str, Activation]:
    """The activations of a decoder by name, module by module."""
    c = model.config
    found: dict[str, Activation] = {}

    def add(name: str, module: Any, *shape: int, **options: Any) -> None:
        """An activation (B, T, ...) that is the input or the output of a module."""
        site = ModuleSite(name, module, **options)
        found[name] = Activation(site, ("B", "T", *shape), site.axis)

    def add_norm(name: str, module: nn.Module, *shape: int) -> None:
        if isinstance(module, nn.ModuleList):
            for head, norm in enumerate(module):
                add_norm(f"{name}.{head}", norm, shape[-1])
        elif not isinstance(module, nn.Identity):
            add(name, module, *shape)
            if isinstance(module, LayerNormModule | RMSNormModule):
                site = ScaleSite(f"{name}.scale", module)
                found[f"{name}.scale"] = Activation(site, ("B", "T", *shape[:-1], 1), editable=False)

    def add_plain(name: str, mlp: PlainFeedForwardModule, outer: nn.Module | None = None) -> None:
        units, gated = mlp.down.in_features, isinstance(mlp, GatedFeedForwardModule)
        add(f"{name}.pre", mlp.gate if gated else mlp.up, units, axis=2, outer=outer)
        if gated:
            add(f"{name}.up", mlp.up, units, axis=2, outer=outer)
        add(f"{name}.post", mlp.down, units, of_input=True, axis=2, outer=outer)

    def add_attention(name: str, attn: nn.Module, layer: int) -> None:
        rotary = rotates(at(c.position, layer))
        entries = at(c.attention, layer).entries(c)
        if isinstance(attn, SelfAttentionModule):
            add_norm(f"{name}.q_norm", attn.q_norm, c.n_heads * c.d_head // attn.q_group, attn.q_group)
            add_norm(f"{name}.k_norm", attn.k_norm, c.n_kv_heads * c.d_head // attn.k_group, attn.k_group)
            site = partial(tap_context, name, attn)
            heads = {"k": c.n_kv_heads, "q": c.n_heads} | ({"k_rotated": c.n_kv_heads} if rotary else {})
            for one, count in (heads | {"v": c.n_kv_heads}).items():
                found[f"{name}.{one}"] = Activation(site, ("B", "T", count, c.d_head), 2)
        elif isinstance(attn, LatentAttentionModule):
            width = attn.part.d_nope + attn.part.d_rope
            add(f"{name}.q", attn.q, c.n_heads, width, heads=c.n_heads, axis=2)
            site = partial(tap_latent, name, attn)
            for entry, shape in entries.items():
                found[f"{name}.{entry}"] = Activation(site, ("B", "T", *shape))
            for one in ("k", "v", "q_rotated", "k_rotated") if rotary else ("k", "v"):
                wide = attn.part.d_value if one == "v" else width
                found[f"{name}.{one}"] = Activation(site, ("B", "T", c.n_heads, wide), 2, editable=False)
        attend = getattr(attn, "attend", None)
        if isinstance(attend, Attend):
            if rotary and isinstance(attn, SelfAttentionModule):
                site = partial(tap_query, name, attend)
                found[f"{name}.q_rotated"] = Activation(site, ("B", "T", c.n_heads, c.d_head), 2)
            site = partial(tap_attend, name, attend)
            for one in "scores", "masked_scores", "weights":
                found[f"{name}.{one}"] = Activation(site, ("B", c.n_heads, "T", "S"), 1)
        out = getattr(attn, "out", None)
        if isinstance(out, nn.Module):
            wide = attn.part.d_value if isinstance(attn, LatentAttentionModule) else c.d_head
            add(f"{name}.heads", out, c.n_heads, wide, of_input=True, heads=c.n_heads, axis=2)
        add(f"{name}.out", attn, c.d_model)

    def add_mlp(name: str, mlp: nn.Module) -> None:
        if isinstance(mlp, ExpertsModule):
            site, count, top_k = partial(tap_experts, name, mlp), mlp.part.count, mlp.part.top_k
            shapes: dict[str, tuple[int, ...]] = {"router.scores": (count,)} if hasattr(mlp.router, "scoring") else {}
            shapes |= {"router.choices": (top_k,), "shares": (count,)}
            shapes |= {"post": (top_k, mlp.gate.size(1)), "experts": (top_k, c.d_model)}
            for one, shape in shapes.items():
                axis = None if one in ("router.choices", "post") else 2
                found[f"{name}.{one}"] = Activation(site, ("B", "T", *shape), axis, count, one != "router.choices")
            if mlp.shared is not None:
                add_plain(f"{name}.shared", mlp.shared, outer=mlp)
                add(f"{name}.shared.out", mlp.shared, c.d_model, outer=mlp)
        elif isinstance(mlp, PlainFeedForwardModule):
            add_plain(name, mlp)
        add(f"{name}.out", mlp, c.d_model)

    add("embed", model.embed, c.d_embed)
    if model.position is not None:
        add("position", model.position, c.d_model)
    add_norm("embed_norm", model.embed_norm, c.d_model)
    for layer, block in enumerate(model.blocks):
        name = f"blocks.{layer}"
        add(f"{name}.in", block, c.d_model, of_input=True)
        for part, module in block.named_children():
            if part.endswith("norm"):
                add_norm(f"{name}.{part}", module, c.d_model)
            elif part == "attn":
                add_attention(f"{name}.attn", module, layer)
                if mid := getattr(block, "mid", None):
                    found[f"{name}.mid"] = Activation(MidSite(f"{name}.mid", block, *mid), ("B", "T", c.d_model))
            elif part == "mlp":
                add_mlp(f"{name}.mlp", module)
        add(f"{name}.out", block, c.d_model)
    add_norm("norm", model.norm, c.d_model)
    add("logits", model.logit_softcap, c.vocab_size)
    return found
