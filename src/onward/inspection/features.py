"""Sparse autoencoders, which describe an activation as a sum of a few features.

Shapes: B texts, T tokens of each, D width of the activation, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.base.errors import UserError
from onward.data.windows import Batch
from onward.inspection.inputs import check_position, exact, logits
from onward.model.decoder import Decoder, without_dropout
from onward.tracing.edit import edit
from onward.tracing.names import full_name, resolve
from onward.tracing.sites import activations
from onward.tracing.trace import trace
from onward.training.step.loss import Loss


class SparseAutoencoder(nn.Module):
    """A k-sparse autoencoder (Gao et al. 2024) of an activation of a model: it describes each vector x (..., D) as a
    sum of at most `active` of F directions.

    The features f are the `active` largest entries of relu((x - b) Eᵀ + c), the others 0; the reconstruction is f W +
    b. The rows of W are the normalized rows of a parameter, so that features can be compared by size. The gradient of
    the parameter has no component along its rows, since the lengths of its rows have no effect.
    """

    def __init__(self, width: int, features: int, active: int = 16, seed: int = 0) -> None:
        super().__init__()
        self.active = active
        generator = torch.Generator().manual_seed(seed)
        self.directions = nn.Parameter(F.normalize(torch.randn(features, width, generator=generator)))
        self.encoder = nn.Parameter(self.directions.detach().clone())
        self.encoder_bias = nn.Parameter(torch.zeros(features))
        self.bias = nn.Parameter(torch.zeros(width))

    @property
    def decoder(self) -> Tensor:
        return F.normalize(self.directions)  # normalized on use, so that any training loop keeps unit-length rows

    def encode(self, x: Tensor) -> Tensor:
        """Compute the features (..., F), at most `active` of them nonzero, of activation vectors x (..., D)."""
        y = ((x.to(self.bias) - self.bias) @ self.encoder.T + self.encoder_bias).relu()
        best = y.topk(min(self.active, y.size(-1)), dim=-1)
        return torch.zeros_like(y).scatter(-1, best.indices, best.values)

    def forward(self, x: Tensor) -> Tensor:
        """Reconstruct activation vectors x (..., D) from their features."""
        return self.encode(x) @ self.decoder + self.bias

    def changing(self, feature: int, value: float) -> Callable[[Tensor], Tensor]:
        """Return a function that sets the feature of index `feature` to `value` in every vector of an activation and
        leaves the rest unchanged. It is meant for `edit`, which applies it during forward passes of the model
        (steering)."""

        def change(x: Tensor) -> Tensor:
            direction = F.normalize(self.directions[feature], dim=0)
            return x + ((value - self.encode(x)[..., feature, None]) * direction).type_as(x)

        return change


@dataclass(frozen=True)
class ReconstructionLoss(Loss):
    """The loss with which `fit` trains a SparseAutoencoder on the activation `name` of a model: the squared error of
    the reconstruction, relative to the mean square of the activation, summed over tokens."""

    model: Decoder
    name: str

    def __call__(self, autoencoder: SparseAutoencoder, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum over targets to minimize, and the same sum, detached, to report."""
        with torch.no_grad(), without_dropout(self.model), trace(self.model, self.name) as t:
            self.model.hidden(batch.tokens, batch.positions)
        x = exact(t[self.name]).flatten(0, 1)
        error = (autoencoder(x) - x).square().sum(-1).mean() / x.square().sum(-1).mean()
        total = error * batch.num_targets
        return total, total.detach()


def autoencoder_of(model: Decoder, name: str, features: int = 0, active: int = 16, seed: int = 0) -> SparseAutoencoder:
    """Create an untrained SparseAutoencoder for the activation `name` (B, T, D) of a model, with `features` features
    (0: 8 D), of which at most `active` are nonzero at a token. `seed` initializes the weights. Raises a UserError if no
    activation has this name, or if it has another shape or cannot be edited."""
    known, name = activations(model), full_name(name)
    resolve(known, [name])
    if len(known[name].shape) != 3 or known[name].shape[:2] != ("B", "T") or not known[name].editable:
        raise UserError(
            f"Cannot train a sparse autoencoder on {name}, which is {known[name]}: choose an activation (B, "
            "T, D), such as mlp.out"
        )
    width = int(known[name].shape[2])
    return SparseAutoencoder(width, features or 8 * width, active, seed).to(model.device)


@dataclass(frozen=True)
class FeatureEffect:
    """The effect of one feature of a sparse autoencoder on one next-token prediction of a model: the unchanged model,
    compared with the model in which the feature is set to 0 at every token."""

    divergence: float  # KL(unchanged || without the feature) in nats
    raised: list[int]  # ids of the tokens whose probability the feature raises most
    lowered: list[int]  # ids of the tokens whose probability the feature lowers most


def feature_effect(
    model: Decoder,
    name: str,
    autoencoder: SparseAutoencoder,
    feature: int,
    tokens: Sequence[int],
    position: int = -1,
    top: int = 3,
) -> FeatureEffect:
    """Measure the effect of the feature of index `feature`, of a sparse autoencoder of the activation `name`, on the
    next-token prediction after a position (negative: from the end) of a text. The result has the `top` tokens whose
    probabilities the feature raises and lowers most."""
    position = check_position(position, tokens)
    p = exact(logits(model, tokens)[position]).softmax(-1)
    with edit(model, {name: autoencoder.changing(feature, 0.0)}):
        without = exact(logits(model, tokens)[position]).softmax(-1)
    change, top = p - without, min(top, len(p) // 2)
    ids = [change.topk(top, largest=largest).indices.tolist() for largest in (True, False)]
    return FeatureEffect(float((p * (p.log() - without.log()).nan_to_num()).sum()), *ids)
