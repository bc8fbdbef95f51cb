"""Routers: which experts a token visits, and with what weight. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward.fields import Part

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Router(Part):
    """A linear score for each expert, and what becomes of the scores."""

    renormalize: bool = True  # the weights of the visited experts sum to 1
    scale: float = 1.0  # of the weights
    groups: int = 1  # the experts are in this many groups
    active_groups: int = 1  # of which a token visits experts of this many

    def build(self, width: int, experts: int, active: int) -> nn.Module:
        """A module from tokens (N, D) to the weights and the numbers of the experts they visit, both (N, A)."""
        raise NotImplementedError


@dataclass(frozen=True)
class SoftmaxRouting(Router, kind="softmax"):
    """Shares of a softmax over all experts; a group counts by its best expert (Mixtral, DeepSeek-V2)."""

    bias: bool = False  # of the scores

    def build(self, width: int, experts: int, active: int) -> nn.Module:
        from onward.model.experts import SoftmaxModule

        return SoftmaxModule(self, width, experts, active, self.bias)


@dataclass(frozen=True)
class SigmoidRouting(Router, kind="sigmoid"):
    """Each expert scored by itself; a correction that is not trained by gradient, for the balance of the experts,
    takes part in the choice but not in the weight, and a group counts by its best two (DeepSeek-V3)."""

    def build(self, width: int, experts: int, active: int) -> nn.Module:
        from onward.model.experts import SigmoidModule

        return SigmoidModule(self, width, experts, active)
