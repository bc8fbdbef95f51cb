"""Measures a model's layers: entropy of attention, dead units.

Shapes: B windows, T tokens of each, N tokens, H heads, D d_model, F feed-forward units, A experts per token.
"""

import warnings
from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from onward.data.windows import Batch
from onward.model.decoder import Decoder, without_dropout
from onward.tracing.listening import Uncompiled
from onward.tracing.names import activation_names
from onward.tracing.sites import attend_modules
from onward.tracing.trace import trace

TOKENS = 128  # number of tokens of the window whose attention is measured
DEAD = 1e-5  # a unit is dead if it stays below this share of the layer's largest activation


@torch.no_grad()
def measure(model: Decoder, batch: Batch) -> dict[str, float]:
    """Measure a model's layers on a batch. Changes no state: no dropout, gradients or random numbers.

    attention_entropy/LAYER  entropy of the attention weights of a token, in nats, averaged over heads, the first 128
                             tokens of the first window, and the calls of a block that attends several times; the weight
                             of a sink counts as one more weight. The entropy is ln(t + 1) at position t for uniform
                             weights, and 0 for a single weight of 1
    dead_units/LAYER         share of the feed-forward's units (of experts: those with tokens) that stay below 1e-5 of
                             the layer's largest activation at every token of the batch
    """
    positions = None if batch.positions is None else batch.positions[:1, :TOKENS]
    sinks = {layer: attend.sinks is not None for layer, attend in attend_modules(model).items()}
    entropies: dict[int, list[float]] = defaultdict(list)

    def note_entropy(name: str, weights: Tensor) -> None:
        layer = layer_of(name)
        entropies[layer].append(entropy(weights, sinks[layer]))

    quietly = partial(warnings.catch_warnings, action="ignore", category=Uncompiled)
    if weights := [name for name in activation_names(model) if name.endswith("attn.weights")]:
        with quietly(), without_dropout(model), trace(model, *weights, keep=note_entropy):
            model.hidden(batch.tokens[:1, :TOKENS], positions)
    peaks: dict[int, list[Tensor]] = defaultdict(list)
    chosen: dict[int, Tensor] = {}

    def note_peaks(name: str, x: Tensor) -> None:
        layer = layer_of(name)
        if name.endswith("choices"):
            chosen[layer] = x
        else:
            peaks[layer].append(peaks_of(x, chosen[layer] if x.ndim == 4 else None))

    ends = "mlp.router.choices", "mlp.post", "mlp.shared.post"
    if names := [name for name in activation_names(model) if name.endswith(ends)]:
        with quietly(), without_dropout(model), trace(model, *names, keep=note_peaks):
            model.hidden(batch.tokens, batch.positions)
    figures = {f"attention_entropy/{layer}": sum(calls) / len(calls) for layer, calls in entropies.items()}
    for layer, of_layer in peaks.items():
        units = torch.cat(of_layer)
        figures[f"dead_units/{layer}"] = int((units <= DEAD * units.max()).sum()) / len(units)
    return figures


def layer_of(name: str) -> int:
    return int(name.split(".")[1])


def peaks_of(units: Tensor, chosen: Tensor | None) -> Tensor:
    """Compute the largest absolute activation of each feed-forward unit, (F,), from activations `units` (..., F), with
    `chosen` None. In a layer with experts, `units` is (B, T, A, F), and `chosen` (B, T, A) is the expert of each vector
    of activations; the units of all experts with tokens are then concatenated, expert by expert."""
    units = units.abs().float().flatten(0, -2)
    if chosen is None:
        return units.amax(0)
    used, rows = chosen.flatten().unique(return_inverse=True)
    peaks = units.new_zeros(len(used), units.size(1))
    return peaks.scatter_reduce_(0, rows[:, None].expand_as(units), units, "amax").flatten()


def entropy(weights: Tensor, sinks: bool) -> float:
    """Compute the mean entropy, in nats, of rows of attention weights (..., T). With `sinks` (learned scores that take
    a part of the softmax), the remainder, 1 minus the sum of a row, counts as one more weight."""
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    nats = torch.special.entr(weights).sum(-1)
    if sinks:
        nats = nats + torch.special.entr((1 - weights.sum(-1)).clamp(min=0))
    return nats.mean().item()
