"""The logit lens and the tuned lens: the next tokens that each layer's residual stream predicts.

Shapes: L layers, B texts, T tokens, D d_model, V vocabulary, K candidates; L + 1 residual streams: before the first
block and after each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.data.windows import Batch
from onward.inspection.inputs import as_row, exact, frozen
from onward.model.decoder import Decoder, without_dropout
from onward.tracing.trace import trace
from onward.training.step.loss import Loss


@dataclass(frozen=True)
class Lens:
    """The result of a logit lens: the likeliest next tokens and their probabilities, predicted from each layer's
    residual stream at each position of a text."""

    tokens: list[int]
    names: list[str]  # names of the residual streams (L + 1,)
    ids: Tensor  # (L + 1, T, K), the likeliest next tokens
    probabilities: Tensor  # (L + 1, T, K)
    next_probability: Tensor  # (L + 1, T - 1), probability of the text's next token
    divergence: Tensor  # (L + 1, T), KL(last layer || this layer) in nats


def residuals(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """Residual streams (B, T, D) before the first block and after each block."""
    with without_dropout(model), trace(model, "blocks.0.in", "blocks.*.out") as t:
        model.hidden(tokens)
    return [t["blocks.0.in"], *(t[f"blocks.{layer}"] for layer in range(model.config.n_layers))]


@torch.no_grad()
def logit_lens(
    model: Decoder, tokens: Sequence[int], top: int = 5, tuned: Callable[[int, Tensor], Tensor] | None = None
) -> Lens:
    """Predict the next token at each position from the residual stream before the first block and after each block,
    through the model's own final norm and head (nostalgebraist 2020).

    `top` is the number of likeliest tokens to list; `tuned`, called with (layer, residual stream (T, D)), such as a
    TunedLens, first translates the stream into the residual stream after the last block.
    """
    streams = residuals(model, as_row(model, tokens))
    top = min(top, model.config.vocab_size)
    last = model.logits(model.norm(streams[-1]))[0]
    final = exact(last).log_softmax(-1)
    ids, probabilities, following, divergence = [], [], [], []
    following_ids = torch.tensor(list(tokens)[1:], device=model.device, dtype=torch.long)[:, None]
    for layer, x in enumerate(streams):  # one at a time, so that only one tensor (T, V) is in memory
        x = x if tuned is None else tuned(layer, x)
        log_p = exact(model.logits(model.norm(x)))[0].log_softmax(-1)
        best = log_p.topk(top)
        ids.append(best.indices)
        probabilities.append(best.values.exp())
        following.append(log_p[:-1].gather(1, following_ids)[:, 0].exp())
        divergence.append((final.exp() * (final - log_p)).sum(-1))
    names = ["blocks.0.in", *(f"blocks.{layer}.out" for layer in range(model.config.n_layers))]
    stacked = [torch.stack(rows).cpu() for rows in (ids, probabilities, following, divergence)]
    return Lens(list(tokens), names, *stacked)


class TunedLens(nn.Module):
    """One affine map for each layer that translates its residual stream into the one after the last block (Belrose et
    al. 2023), so that the model's head can read it: x (..., D) -> x + x Wᵀ + b. W and b are initialized to 0, for which
    the tuned lens equals the logit lens."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        d = model.config.d_model
        self.maps = nn.ModuleList(nn.Linear(d, d) for _ in range(model.config.n_layers))
        for module in self.maps:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
        self.to(model.device, model.dtype)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, layer: int, x: Tensor) -> Tensor:
        """Translate the residual stream x (..., D) before block `layer` into the one after the last block. With `layer`
        L, the number of blocks, x is that stream already and is returned unchanged."""
        return x if layer == len(self.maps) else x + self.maps[layer](x)


@dataclass(frozen=True)
class LensLoss(Loss):
    """The training loss of a TunedLens: the KL divergence KL(model || lens) of the next-token distributions, summed
    over tokens and averaged over the streams before the last one."""

    model: Decoder

    def __call__(self, lens: TunedLens, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum over tokens to minimize, and the same sum detached, to report."""
        with torch.no_grad():
            streams = residuals(self.model, batch.tokens)
            final = exact(self.model.logits(self.model.norm(streams[-1]))).log_softmax(-1)
        total = torch.zeros((), device=final.device)
        with frozen(self.model):
            for layer, x in enumerate(streams[:-1]):
                log_p = exact(self.model.logits(self.model.norm(lens(layer, x)))).log_softmax(-1)
                total = total + F.kl_div(log_p, final, log_target=True, reduction="sum")
        return total / (len(streams) - 1), total.detach() / (len(streams) - 1)
