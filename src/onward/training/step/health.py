"""Measures the health of a training run: spikes of the loss, entropy of attention, dead units, size of updates.

Shapes: B windows, T tokens of each, N tokens, H heads, D d_model, F feed-forward units, A experts per token.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from onward.data.windows import Batch
from onward.model.decoder import Decoder, without_dropout
from onward.parallel.parallelize import norm_of
from onward.parallel.parts import counted_parameters, is_divided
from onward.tracing.listening import Uncompiled
from onward.tracing.names import activation_names
from onward.tracing.sites import attend_modules
from onward.tracing.trace import trace

REMEMBERED, FEWEST = 64, 16  # losses that are kept, and losses that are needed before one can be called a spike
TOKENS = 128  # of one window, of which attention is measured
DEAD = 1e-5  # a unit is dead if it stays below this share of the layer's largest activation


class Spikes:
    """Decides by loss and gradient norm whether a step failed.

    A loss is a spike if it exceeds the median of the last 64 by more than `limit` deviations and by more than twice the
    largest excess among those 64. A deviation is 1.4826 times the median absolute deviation (the standard deviation of
    normal noise), but at least 5 % of the median and 0.05 nats. So a data source with some much harder batches causes
    no spikes, nor does a loss that rises step by step. With `limit` 0 any finite loss passes.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.state: list[float] = []  # the last losses that were no spikes; part of a trainer's state

    def check_step(self, loss: float, grad_norm: float) -> str:
        """Return the reason why a step with this loss and gradient norm fails; "" if it does not."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return "the gradient is not finite"
        if not self.limit or len(self.state) < FEWEST:
            return ""
        usual = median(self.state)
        deviation = max(1.4826 * median(abs(known - usual) for known in self.state), 0.05 * usual, 0.05)
        if loss - usual > max(self.limit * deviation, 2 * (max(self.state) - usual)):
            return f"the loss {loss:.2f} is far above the {usual:.2f} of the last steps"
        return ""

    def note(self, loss: float) -> None:
        """Record the loss of a completed step, one of the 64 to compare the next losses with."""
        self.state = [*self.state, loss][-REMEMBERED:]


@torch.no_grad()
def measure(model: Decoder, batch: Batch) -> dict[str, float]:
    """Measure a model's layers on a batch. Changes no state: no dropout, gradients or random numbers. A model that is
    divided over processes is not measured, and has no figures.

    attention_entropy/LAYER  entropy of the attention weights of a token, in nats, averaged over heads and the first 128
                             tokens of the first window; the weight of a sink counts as one more. ln(t + 1) at position
                             t for uniform weights, 0 for a weight of 1
    dead_units/LAYER         share of the feed-forward's units (of experts: those with tokens) that stay below 1e-5 of
                             the layer's largest activation at every token of the batch
    """
    if is_divided(model):
        return {}
    positions = None if batch.positions is None else batch.positions[:1, :TOKENS]
    sinks = {layer: attend.sinks is not None for layer, attend in attend_modules(model).items()}
    figures = dict[str, float]()

    def note_entropy(name: str, weights: Tensor) -> None:
        layer = layer_of(name)
        figures[f"attention_entropy/{layer}"] = entropy(weights, sinks[layer])

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
    for layer, of_layer in peaks.items():
        units = torch.cat(of_layer)
        figures[f"dead_units/{layer}"] = int((units <= DEAD * units.max()).sum()) / len(units)
    return figures


def layer_of(name: str) -> int:
    """Return the layer number in an activation's name, which has the form `blocks.LAYER...`."""
    return int(name.split(".")[1])


def peaks_of(units: Tensor, chosen: Tensor | None) -> Tensor:
    """Compute the largest absolute activation of each feed-forward unit, (F,), from activations `units` (..., F), with
    `chosen` None. In a layer with experts, `units` is (B, T, A, F), and `chosen` (B, T, A) holds the expert of each
    vector of activations; the units of all experts with tokens are then concatenated, expert by expert."""
    units = units.abs().float().flatten(0, -2)
    if chosen is None:
        return units.amax(0)
    used, rows = chosen.flatten().unique(return_inverse=True)
    peaks = units.new_zeros(len(used), units.size(1))
    return peaks.scatter_reduce_(0, rows[:, None].expand_as(units), units, "amax").flatten()


def entropy(weights: Tensor, sinks: bool) -> float:
    """Compute the mean entropy, in nats, of rows of attention weights (..., T). With `sinks`, learned scores that take
    a part of the softmax, 1 minus the sum of a row counts as one more weight."""
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    nats = torch.special.entr(weights).sum(-1)
    if sinks:
        nats = nats + torch.special.entr((1 - weights.sum(-1)).clamp(min=0))
    return nats.mean().item()


def matrices(model: nn.Module) -> list[Tensor]:
    """List the trainable matrices and stacks of matrices of a model, detached; each of a pipeline in one stage."""
    return [p.detach() for p in counted_parameters(model) if p.requires_grad and p.ndim >= 2]


def update_ratio(before: Sequence[Tensor], model: nn.Module) -> float:
    """Compute the norm of the change of a model's trainable matrices divided by their norm. `before` are clones of
    `matrices(model)` made before the update.

    About 1e-3 is usual; much less learns slowly, much more is unstable.
    """
    exact = lambda tensor: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    norm = lambda tensors: norm_of([exact(tensor) for tensor in tensors], divided=is_divided(model))
    return norm(now - then for now, then in zip(matrices(model), before, strict=True)) / (norm(before) or 1.0)
