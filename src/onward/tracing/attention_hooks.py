"""Hooks for the activations inside attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.model.activations import ContextVectors, Latents, Queries, Scores
from onward.model.context import AttentionContext
from onward.model.latent import LatentAttentionModule
from onward.model.layer_cache import CacheEntry, Keys, to_tensor
from onward.model.reference import attention_scores, masked_scores, sink_softmax, weighted_sum
from onward.tracing.hooks import ModelHooks


@dataclass(frozen=True, eq=False)
class TracedContext(AttentionContext):
    """The context (rotations, cache and mask) that a traced layer with self-attention receives in place of the plain
    AttentionContext: it also passes queries, keys and values to active traces and edits."""

    hooks: ModelHooks | None = None
    name: str = ""  # name of the attention
    rotated: Iterator[str] = iter(())  # names of the vectors that the layer rotates, in the order of rotation
    cached: Mapping[str, str] = field(default_factory=dict)  # name of the vector in each cache entry

    def rotate(self, x: Tensor) -> Tensor:
        assert self.hooks is not None
        return super().rotate(self.hooks.visit(f"{self.name}.{next(self.rotated)}", x, 2))

    def update(self, **new: Tensor) -> tuple[Tensor | CacheEntry, ...]:
        assert self.hooks is not None
        for entry, name in self.cached.items():
            new[entry] = self.hooks.visit(f"{self.name}.{name}", new[entry], 2)
        return super().update(**new)


@dataclass(frozen=True, eq=False)
class LatentContext(AttentionContext):
    """The context (rotations, cache and mask) that a traced layer with multi-head latent attention receives in place of
    the plain AttentionContext. It also passes the latents and the rotary keys to active traces and edits, and the
    queries, keys and values of each head to active traces."""

    hooks: ModelHooks | None = None
    name: str = ""  # name of the attention
    attn: LatentAttentionModule | None = None
    made: dict[str, Tensor] = field(default_factory=dict)  # q, and the rotary parts before and after the rotation

    def rotate(self, x: Tensor) -> Tensor:  # called for the query first, then for the key
        one = "k" if "q_rope" in self.made else "q"
        self.made[f"{one}_rope"], self.made[f"{one}_rotated"] = x, super().rotate(x)
        return self.made[f"{one}_rotated"]

    def update(self, **new: Tensor) -> tuple[Tensor | CacheEntry, ...]:
        assert self.hooks is not None
        if "latent" not in new:  # the keys of an indexer
            return super().update(**new)
        new = {entry: self.hooks.visit(f"{self.name}.{entry}", x[:, :, 0]) for entry, x in new.items()}
        if self.hooks.wants(*(f"{self.name}.{one}" for one in ("q_rotated", "k", "k_rotated", "v"))):
            self.visit_heads(**new)
        return super().update(**{entry: x[:, :, None] for entry, x in new.items()})

    @torch.no_grad()
    def visit_heads(self, latent: Tensor, rotary: Tensor) -> None:
        """Pass to the active traces: rotated queries (B, T, H, P + R), keys before and after the rotation, and values
        (B, T, H, F). Keys and values are computed from the latents (B, T, L); keys also contain the rotary keys
        (B, T, R) that all heads share."""
        hooks, attn, made = self.hooks, self.attn, self.made
        assert hooks is not None
        assert attn is not None
        widths = [attn.part.d_nope, attn.part.d_value]
        nope, v = attn.kv(latent).unflatten(-1, (attn.n_heads, -1)).split(widths, -1)
        k_rope, k_rotated = (x.expand(*nope.shape[:-1], -1).type_as(nope) for x in (made["k_rope"], rotary[:, :, None]))
        hooks.visit(f"{self.name}.q_rotated", torch.cat([made["q"][..., : widths[0]], made["q_rotated"]], -1), 2)
        hooks.visit(f"{self.name}.k", torch.cat([nope, k_rope], -1), 2)
        hooks.visit(f"{self.name}.k_rotated", torch.cat([nope, k_rotated], -1), 2)
        hooks.visit(f"{self.name}.v", v, 2)


def hook_context(where: ContextVectors, name: str, attn: nn.Module, hooks: ModelHooks) -> None:
    """Add the hook for queries and keys before their rotation, and for keys and values as they enter the cache."""

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, context = inputs
        facts: dict[str, Any] = {"hooks": hooks, "name": name, "rotated": iter(where.rotated), "cached": where.cached}
        return x, TracedContext(**vars(context), **facts)

    hooks.before(attn, before, *(f"{name}.{one}" for one in where.names))


def hook_queries(where: Queries, name: str, attn: nn.Module, hooks: ModelHooks) -> None:
    """Add the hook for queries after their rotation."""

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return hooks.visit(f"{name}.q_rotated", inputs[0], 2), *inputs[1:]

    hooks.before(attn.get_submodule(where.attend), before, f"{name}.q_rotated")


def hook_latents(where: Latents, name: str, attn: LatentAttentionModule, hooks: ModelHooks) -> None:
    """Add the hooks for the latent and the rotary key in the cache, and for queries, keys and values of each head."""
    names = [f"{name}.{one}" for one in where.names]
    state = local()  # per thread, since another thread may run the same module

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, context = inputs
        state.made = dict[str, Tensor]()
        return x, LatentContext(**vars(context), hooks=hooks, name=name, attn=attn, made=state.made)

    def projected(_: nn.Module, inputs: object, output: Tensor) -> None:
        state.made["q"] = output.unflatten(-1, (attn.n_heads, -1))

    hooks.before(attn, before, *names)
    hooks.after(attn.q, projected, *names)


def hook_scores(where: Scores, name: str, attn: nn.Module, hooks: ModelHooks) -> None:
    """Add the hook for scores before and after the mask, and for attention weights."""
    steps = [f"{name}.{step}" for step in where.names]
    attend: Any = attn.get_submodule(where.attend)

    def after(_: nn.Module, inputs: tuple[Tensor, Keys, Keys, AttentionContext], output: Tensor) -> Tensor | None:
        q, k, v, context = inputs
        edited, differentiated = hooks.edits(*steps), hooks.gradients(*steps)
        k, v = to_tensor(k, q.dtype), to_tensor(v, q.dtype)
        if differentiated and not edited:
            q, k, v = q.detach().requires_grad_(), k.detach(), v.detach()
        q = attend.scaled(q, context)
        gradient = nullcontext() if edited or differentiated else torch.no_grad()
        with gradient, torch.autocast(q.device.type, enabled=False):
            weights = visited_weights(q, k, context)
            if edited:
                return weighted_sum(F.dropout(weights, attend.dropout, attend.training), v)
            if differentiated:
                return with_gradient_of(output, weighted_sum(weights, v))
        return None

    def visited_weights(q: Tensor, k: Tensor, context: AttentionContext) -> Tensor:
        """Attention weights (B, H, T, S), as the `reference` backend computes them."""
        bias = None if context.mask.causal_only else context.mask.dense(q.dtype)
        x = attention_scores(q, k, scale=attend.scale, softcap=attend.softcap)
        x = masked_scores(hooks.visit(steps[0], x, 1, mask=context.mask), bias)
        x = sink_softmax(hooks.visit(steps[1], x, 1, mask=context.mask), attend.sinks)
        return hooks.visit(steps[2], x, 1, mask=context.mask)

    hooks.after(attend, after, *steps)


def with_gradient_of(output: Tensor, same: Tensor) -> Tensor:
    """Return `output`, bit for bit, with a gradient that also flows to `same`, the equal values computed for a
    trace."""
    return output + (same - same.detach()).type_as(output)
