"""Activation patching and its first-order estimate, attribution patching: which activations cause the difference
between two texts.

Shapes: B texts, L layers, H heads, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.inspection.inputs import as_row, exact, frozen
from onward.model.decoder import Decoder, without_dropout
from onward.tracing.edit import edit
from onward.tracing.sites import activations
from onward.tracing.trace import trace

Metric = Callable[[Tensor], Tensor]  # logits (B, T, V) -> a number for each text, (B,)
TOGETHER = 32  # number of texts in one call


@dataclass(frozen=True)
class Patching:
    """The result of activation patching: for each place, the effect of replacing an activation of a `corrupted` text by
    the activation of a `clean` text. Effects are shares of the difference of a metric: 0 keeps the metric of the
    corrupted text, 1 restores the metric of the clean text."""

    clean: list[int]
    corrupted: list[int]
    site: str  # the activation in each block: in, mid, attn.out, mlp.out, attn.heads, ...
    effects: Tensor  # (L, T); with heads (L, H), or (L, H, T) if estimated; 0 in layers without the activation
    clean_metric: float
    corrupted_metric: float


def logit_difference(right: int, wrong: int, position: int = -1) -> Metric:
    """Return a metric for activation patching: a function of logits (B, T, V) that computes the logit of token id
    `right` minus that of token id `wrong` at a position (negative: from the end), (B,)."""
    return lambda logits: logits[:, position, right] - logits[:, position, wrong]


def heads_of(model: Decoder, site: str) -> dict[int, tuple[int, int]]:
    """Return (axis of heads, number of heads) of `blocks.LAYER.SITE` for each layer that has this activation; (1, 0)
    for an activation that is patched by position, because it has no heads or its last axis has units."""
    heads = {}
    for layer in range(model.config.n_layers):
        if activation := activations(model).get(f"blocks.{layer}.{site}"):
            axis = activation.axis
            by_head = axis is not None and axis < len(activation.shape) - 1 and not activation.count
            heads[layer] = (axis, activation.parts) if by_head and axis is not None else (1, 0)
    return heads


def rows_of(model: Decoder, clean: Sequence[int], corrupted: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return both texts as tensors (1, T). Raises a UserError if their lengths differ."""
    if len(clean) != len(corrupted):
        raise UserError(
            f"Cannot patch between texts of {len(clean)} and {len(corrupted)} tokens: give texts of the same length"
        )
    return as_row(model, clean), as_row(model, corrupted)


def differing(good: Tensor, bad: Tensor) -> tuple[float, float]:
    """Return both metrics. Raises a UserError if they are equal, since there is no effect to measure."""
    if float(good) == float(bad):
        raise UserError(
            "Cannot measure an effect, because the metric is the same for both texts: choose other texts, or "
            "another metric"
        )
    return float(good), float(bad)


@torch.no_grad()
def activation_patching(
    model: Decoder, clean: Sequence[int], corrupted: Sequence[int], metric: Metric, site: str = "in"
) -> Patching:
    """Measure how far replacing one activation in the forward pass of the corrupted text by that of the clean text
    restores the clean text's `metric`, a function of logits (B, T, V). The activations are `blocks.LAYER.SITE` of each
    layer, where `site` is SITE, such as "in". Each effect is exact: the model reads the text once for each (layer,
    position) or, if the activation has heads, each (layer, head). Both texts are token ids of the same length.

    (Causal tracing, Meng et al. 2022; path-free activation patching, Wang et al. 2022.)
    """
    clean_row, row = rows_of(model, clean, corrupted)
    with without_dropout(model):
        with trace(model, f"blocks.*.{site}") as t:
            clean_metric = metric(model(clean_row))
        good, bad = differing(clean_metric, metric(model(row)))
    heads = heads_of(model, site)
    effects = torch.zeros(model.config.n_layers, max(count for _, count in heads.values()) or len(clean))
    for layer, (axis, count) in heads.items():
        name = f"blocks.{layer}.{site}"
        for indices in torch.arange(count or len(clean), device=model.device).split(TOGETHER):
            change = partial(patched, t[name], indices, axis)
            with without_dropout(model), edit(model, {name: change}):
                patched_metric = exact(metric(model(row.expand(len(indices), -1))))
            effects[layer, indices.cpu()] = ((patched_metric - bad) / (good - bad)).float().cpu()
    return Patching(list(clean), list(corrupted), site, effects, good, bad)


def patched(clean: Tensor, indices: Tensor, axis: int, x: Tensor) -> Tensor:
    """Return a copy of x (B, ...), the activation of the corrupted text in B rows, in which row i has slice indices[i]
    along `axis` from `clean` (1, ...)."""
    x = x.clone()
    for row, index in enumerate(indices.tolist()):
        x[row].select(axis - 1, index).copy_(clean[0].select(axis - 1, index))
    return x


def attribution_patching(
    model: Decoder, clean: Sequence[int], corrupted: Sequence[int], metric: Metric, site: str = "attn.heads"
) -> Patching:
    """Estimate the effects of `activation_patching`, with the same arguments, for all (layer, position), or (layer,
    head, position), by two forward passes and one backward pass: (clean - corrupted activation) · gradient of the
    metric (Nanda 2023)."""
    clean_row, row = rows_of(model, clean, corrupted)
    names = f"blocks.*.{site}"
    with without_dropout(model), frozen(model):
        with torch.no_grad(), trace(model, names) as t:
            clean_metric = metric(model(clean_row))
        with torch.enable_grad(), trace(model, names, gradients=True) as given:
            corrupted_metric = metric(model(model.embed(row).detach().requires_grad_()))
            good, bad = differing(clean_metric, corrupted_metric.detach())
            corrupted_metric.sum().backward()
    heads = heads_of(model, site)
    most = max(count for _, count in heads.values())
    effects = torch.zeros(model.config.n_layers, *[most] * bool(most), len(clean))
    for layer, (axis, count) in heads.items():
        name = f"blocks.{layer}.{site}"
        change = exact((t[name] - given[name].detach()) * given.grad(name))[0].sum(-1) / (good - bad)  # (T,) or (T, H)
        if count:
            effects[layer, :count] = change.movedim(axis - 1, 0).cpu()
        else:
            effects[layer] = change.cpu()
    return Patching(list(clean), list(corrupted), site, effects, good, bad)
