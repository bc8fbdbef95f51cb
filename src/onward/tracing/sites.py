"""The sites of a decoder's activations: for each activation name, an object or function that adds the hooks that read
or change it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.model.activations import (
    Activation,
    Child,
    ContextVectors,
    ExpertSteps,
    Input,
    Latents,
    Mid,
    NormScale,
    Output,
    Queries,
    Scores,
    Steps,
    declared,
)
from onward.model.attention import Attend
from onward.model.decoder import Decoder
from onward.tracing.attention_hooks import hook_context, hook_latents, hook_queries, hook_scores
from onward.tracing.expert_hooks import check_rows, hook_experts
from onward.tracing.hooks import AddHooks, ModelHooks, Traceable


@dataclass(frozen=True, eq=False)
class ModuleSite:
    """An activation that is the input or the output of a module. Calling the object adds the hook.

    `heads` > 0 splits the last dimension into heads. If the tensors of `module` have B and T flattened into one
    dimension, `outer` is the enclosing module whose input has both dimensions.
    """

    name: str
    module: nn.Module
    of_input: bool = False
    axis: int | None = None
    heads: int = 0
    outer: nn.Module | None = None

    def __call__(self, hooks: ModelHooks) -> None:
        state = local()  # per thread, since another thread may run the same module

        def note(outer: nn.Module, inputs: tuple[Any, ...]) -> None:
            check_rows(outer)
            state.leading = inputs[0].shape[:-1]

        def visited(tensor: Tensor) -> Tensor | None:
            value = tensor
            if self.heads:
                value = tensor.unflatten(-1, (self.heads, -1))
            elif self.outer is not None:
                value = tensor.unflatten(0, state.leading)
            new = hooks.visit(self.name, value, self.axis)
            if new is tensor or (new is value and not hooks.gradients(self.name)):
                return None
            return new.view_as(tensor)  # a gradient that is kept passes through the reshaped tensor

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            new = visited(inputs[0])
            return None if new is None else (new, *inputs[1:])

        def after(_: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
            return visited(output)

        if self.outer is not None:
            hooks.before(self.outer, note, self.name)
        if self.of_input:
            hooks.before(self.module, before, self.name)
        else:
            hooks.after(self.module, after, self.name)


@dataclass(frozen=True, eq=False)
class MidSite:
    """The residual stream between attention and feed-forward. Calling the object adds the hooks. The stream goes to the
    feed-forward and to the residual sum, so an edit changes the input of the feed-forward and adds the difference,
    times `kept`, to the sum."""

    name: str
    block: nn.Module
    reader: str  # submodule that reads the stream
    sum_at: str  # submodule whose input is the sum; "": the sum is the output of the block
    kept: float  # factor of the stream in the sum

    def __call__(self, hooks: ModelHooks) -> None:
        state = local()

        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            new = hooks.visit(self.name, inputs[0])
            state.difference = None if new is inputs[0] else (new - inputs[0]) * self.kept
            return new, *inputs[1:]

        def added(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            return None if state.difference is None else (inputs[0] + state.difference, *inputs[1:])

        def after(_: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
            return None if state.difference is None else output + state.difference

        hooks.before(self.block.get_submodule(self.reader), before, self.name)
        if self.sum_at:
            hooks.before(self.block.get_submodule(self.sum_at), added, self.name)
        else:
            hooks.after(self.block, after, self.name)


def norm_scale(where: NormScale, name: str, module: nn.Module, hooks: ModelHooks) -> None:
    """Add the hook on the norm `module`, called `name`, for its divisor, (..., 1) for inputs (..., D): sqrt(variance +
    eps) if `where.centered` (LayerNorm), else sqrt(mean square + eps) (RMSNorm), computed a second time."""
    norm: Any = module

    @torch.no_grad()
    def scale(_: nn.Module, inputs: tuple[Tensor]) -> None:
        x = inputs[0].to(torch.promote_types(inputs[0].dtype, torch.float32))
        if where.centered:
            x = x - x.mean(-1, keepdim=True)
        hooks.visit(f"{name}.scale", (x.square().mean(-1, keepdim=True) + norm.eps).sqrt())

    hooks.before(module, scale, f"{name}.scale")


def site_of(one: Activation, name: str, prefix: str, module: nn.Module, outer: nn.Module) -> AddHooks:
    """Return the function that adds the hooks of one activation, as its module declares it.

    `name` is the full name of the activation, `prefix` that of its `module`; `outer` is the nearest enclosing module
    whose input has the dimensions (B, T).
    """
    where = one.where
    if isinstance(where, Output):
        target, of_input = module.get_submodule(where.of), isinstance(where, Input)
        return ModuleSite(name, target, of_input, one.axis, where.heads, outer if where.flat else None)
    if isinstance(where, Mid):
        return MidSite(name, module, where.reader, where.sum_at, where.kept)
    assert isinstance(where, Steps)
    return partial(HOOKS[type(where)], where, prefix, module)


HOOKS: dict[type[Steps], Callable[..., None]] = {
    NormScale: norm_scale,
    ContextVectors: hook_context,
    Queries: hook_queries,
    Scores: hook_scores,
    Latents: hook_latents,
    ExpertSteps: hook_experts,
}


def check_step(module: nn.Module, name: str, where: Steps, known: dict[type[Steps], Steps]) -> None:
    """Raise a UserError if a module declares a step that its `Steps` do not have, or two different `Steps` of the same
    type."""
    kind, own = type(where).__name__, type(module).__name__
    if name not in where.names:
        raise UserError(f"{own} declares the activation {name!r} of {kind}, whose steps are {', '.join(where.names)}")
    if known.setdefault(type(where), where) != where:
        raise UserError(f"{own} declares two different {kind}: all of its activations must declare the same one")


def attend_modules(model: Decoder) -> dict[int, Attend]:
    """The submodule of each layer that computes attention from queries, keys and values."""
    modules: dict[int, Attend] = {}
    for name, activation in activations(model).items():
        layer, site = re.match(r"blocks\.(\d+)\.", name), activation.site
        if layer and isinstance(site, partial) and isinstance(site.args[0], Scores):
            modules[int(layer[1])] = site.args[2].get_submodule(site.args[0].attend)
    return modules


def activations(model: Decoder) -> dict[str, Traceable]:
    """Return the activations that the modules of a decoder declare as traceable, by full name, such as
    `blocks.3.attn.weights`."""
    known_sites: dict[str, Traceable] = {}

    def walk(prefix: str, module: nn.Module, child: Child, outer: nn.Module) -> None:
        known: dict[type[Steps], Steps] = {}  # the steps of this module
        steps: dict[type[Steps], AddHooks] = {}
        for name, one in declared(module, child).items():
            full = ".".join(filter(None, (prefix, name)))
            if isinstance(one, Child):
                walk(full, module.get_submodule(one.of), one, outer if child.flat else module)
                continue
            around = outer if child.flat else module
            site = site_of(one, full, prefix, module, around)
            if isinstance(one.where, Steps):
                check_step(module, name, one.where, known)
                site = steps.setdefault(type(one.where), site)
            shape = tuple(model.config.d_model if size == "D" else size for size in one.shape)
            known_sites[full] = Traceable(site, shape, one.axis, one.count, one.editable)

    walk("", model, Child(""), model)
    return known_sites
