"""Routing of a mixture of experts: which experts process a token, and the weights of their outputs. Without torch.

Shapes: N tokens, D d_model, K experts per token (top_k).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward.config.part_types import Factor, Size
from onward.fields import Part

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Routing(Part):
    """A linear layer gives a logit per expert; each token is assigned to the top k experts."""

    renormalize: bool = True  # divide the weights of a token's experts by their sum
    scale: Factor = 1.0  # multiplies the weights
    n_groups: Size = 1  # number of equal groups that the experts are divided into
    top_k_groups: Size = 1  # number of groups from which a token's experts are selected

    def build(self, width: int, experts: int, top_k: int) -> nn.Module:
        """A module from tokens (N, D) to the weights and the ids of their experts, both (N, K)."""
        raise NotImplementedError


@dataclass(frozen=True)
class SoftmaxRouting(Routing, kind="softmax"):
    """Scores are a softmax over all experts; the score of a group is its best expert's (Mixtral, DeepSeek-V2)."""

    bias: bool = False  # whether the logits have a bias

    def build(self, width: int, experts: int, top_k: int) -> nn.Module:
        from onward.model.experts import SoftmaxRoutingModule

        return SoftmaxRoutingModule(self, width, experts, top_k, self.bias)


@dataclass(frozen=True)
class SigmoidRouting(Routing, kind="sigmoid"):
    """Scores are sigmoids; a routing bias, which balances the load and is not trained by gradient, is added to select
    experts but not to weight them; the score of a group is the sum of its best two (DeepSeek-V3, section 2.1.2)."""

    def build(self, width: int, experts: int, top_k: int) -> nn.Module:
        from onward.model.experts import SigmoidRoutingModule

        return SigmoidRoutingModule(self, width, experts, top_k)
