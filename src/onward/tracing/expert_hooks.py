"""Hooks for the activations of a mixture of experts."""

from __future__ import annotations

from contextlib import nullcontext
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.base.errors import UserError
from onward.model.activations import ExpertSteps
from onward.model.adapters import WeightAdapters
from onward.model.experts import ExpertsModule
from onward.tracing.hooks import ModelHooks


def hook_experts(where: ExpertSteps, name: str, mlp: ExpertsModule, hooks: ModelHooks) -> None:
    """Add the hooks for the router's scores and choices, the routing weight of each expert (0 if not chosen), and the
    units (inputs of the down projection) and outputs of each token's experts."""
    names = scores, choices, shares, post, experts = [f"{name}.{step}" for step in where.names]
    state = local()  # per thread, since another thread may run the same module

    def begin(_: nn.Module, inputs: tuple[Tensor]) -> None:
        check_rows(mlp)
        state.leading, state.change = inputs[0].shape[:-1], None

    def scored(_: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        value = output.unflatten(0, state.leading)
        new = hooks.visit(scores, value, 2)
        return None if new is value and not hooks.gradients(scores) else new.flatten(0, 1)

    def routed(_: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        weights, ids = output
        if hooks.wants(shares):
            dense = weights.new_zeros(len(ids), mlp.part.count).scatter(1, ids, weights).unflatten(0, state.leading)
            new = hooks.visit(shares, dense, 2)
            if new is not dense:  # an edit may give weights to experts that the router did not choose
                flat = new.flatten(0, 1)
                ids = flat.abs().topk(max(1, int((flat != 0).sum(1).max())), dim=1).indices
            if new is not dense or hooks.gradients(shares):
                weights = new.flatten(0, 1).gather(1, ids)
        if hooks.wants(choices):
            hooks.visit(choices, ids.unflatten(0, state.leading))
        if hooks.wants(post, experts):
            visit_experts(inputs[0], weights, ids)
        return weights, ids

    def visit_experts(tokens: Tensor, weights: Tensor, ids: Tensor) -> None:
        edited, differentiated = hooks.edits(post, experts), hooks.gradients(post, experts)
        if differentiated and not edited:
            tokens, weights = tokens.detach().requires_grad_(), weights.detach()
        with nullcontext() if edited or differentiated else torch.no_grad():
            units = units_of(mlp, tokens, ids)
            plain = outputs_of(mlp, units, ids)
            new_units = hooks.visit(post, units.unflatten(0, state.leading)).flatten(0, 1)
            outputs = visit_each(outputs_of(mlp, new_units, ids) if edited or differentiated else plain, ids)
            if edited or differentiated:
                base = plain if edited else outputs.detach()
                state.change = ((outputs - base) * weights[..., None].type_as(outputs)).sum(1)

    def visit_each(outputs: Tensor, ids: Tensor) -> Tensor:
        """Pass the outputs (N, A, D) of the experts `ids` (N, A) to traces and edits. A trace of a single expert gets 0
        for tokens that do not use it."""
        outputs = hooks.visit(experts, outputs.unflatten(0, state.leading)).flatten(0, 1)
        for expert in sorted(hooks.indices(experts)):
            chosen = (ids == expert)[..., None]
            part = (outputs * chosen).sum(1).unflatten(0, state.leading)
            new = hooks.visit(experts, part, index=expert)
            if new is not part:
                outputs = torch.where(chosen, new.flatten(0, 1)[:, None], outputs)
        return outputs

    def finish(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        return None if state.change is None else output + state.change.view_as(output).type_as(output)

    router: Any = mlp.router
    hooks.before(mlp, begin, *names)
    if hasattr(router, "scoring"):
        hooks.after(router.scoring, scored, scores)
    hooks.after(router, routed, choices, shares, post, experts)
    hooks.after(mlp, finish, post, experts)


def check_rows(mlp: nn.Module) -> None:
    """Raise a UserError if rows use different adapters of the experts, because each expert is then called once per
    adapter."""
    adapters = [child for child in mlp.children() if isinstance(child, WeightAdapters)]
    if any(one.selection.current.groups is not None for one in adapters):
        raise UserError(
            "rows use different adapters of the experts: trace or edit the experts with one adapter at a time"
        )


def units_of(mlp: ExpertsModule, tokens: Tensor, ids: Tensor) -> Tensor:
    """The hidden units (N, A, F) of A experts `ids` (N, A) for each of N tokens (N, D)."""
    dtype = mlp.up.dtype
    tokens = mlp.inward(tokens.to(dtype))
    inner = [mlp.stack(name, dtype) for name in mlp.inner]
    units = tokens.new_zeros(*ids.shape, mlp.up.size(1))
    return of_each(
        units, ids, lambda expert, n, _: mlp.combine(*(project(stack, expert, tokens[n]) for stack in inner))
    )


def outputs_of(mlp: ExpertsModule, units: Tensor, ids: Tensor) -> Tensor:
    """The outputs (N, A, D) of A experts `ids` (N, A), given their hidden units (N, A, F)."""
    down = mlp.stack("down", mlp.down.dtype)
    outputs = units.new_zeros(*ids.shape, mlp.down.size(1))
    return mlp.outward(of_each(outputs, ids, lambda expert, n, a: project(down, expert, units[n, a])))


def of_each(result: Tensor, ids: Tensor, compute: Any) -> Tensor:
    """Return `result` (N, A, ...) with, for each expert, the entries where `ids` (N, A) is the expert replaced by
    compute(expert, rows, columns)."""
    for expert in ids.unique().tolist():
        n, a = (ids == expert).nonzero(as_tuple=True)
        result = result.index_put((n, a), compute(expert, n, a))
    return result


def project(stack: tuple[Tensor, Tensor | None], expert: int, x: Tensor) -> Tensor:
    """One projection of an expert: inputs (N, I) to (N, O), with the weights (X, O, I) and biases of all experts."""
    weight, bias = stack
    return F.linear(x, weight[expert], None if bias is None else bias[expert])
