"""Routing of a mixture of experts: which experts process a token, and the weights of their outputs. Does not import
torch.

Shapes: N tokens, D d_model, K experts per token (top_k).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from onward.base.fields import Part
from onward.config.part_types import OwnMethod
from onward.config.ranges import Epsilon, Factor, Size, SizeOrZero


@dataclass(frozen=True)
class Routing(Part):
    """The selection of experts in a mixture of experts: a linear layer gives each token a logit per expert, scores are
    computed from the logits, and the `top_k` experts with the highest scores process the token.

    `build(width, experts, top_k)` of a routing of your own returns a module from tokens (N, D) to the weights and the
    ids of their experts, both (N, K); `width` is D, and `experts` the number of experts.
    """

    build: ClassVar[OwnMethod] = None
    renormalize: bool = True  # divide the weights of a token's experts by their sum
    scale: Factor = 1.0  # multiplies the weights
    n_groups: Size = 1  # number of equal groups that the experts are divided into
    top_k_groups: Size = 1  # number of groups from which a token's experts are selected
    group_top_k: SizeOrZero = 0  # a group's score is the sum of this many of its best scores; 0: the routing's default
    min_sum: Epsilon = 1e-20  # lower bound of the sum by which the weights are divided
    softcap: Factor | None = None  # logits z become cap * tanh(z / cap)
    selection_bias: bool = False  # a bias per expert is added to the scores for the selection, not for the weights


@dataclass(frozen=True)
class SoftmaxRouting(Routing, kind="softmax"):
    """Scores are a softmax over all experts; the score of a group of experts is that of its best expert (Mixtral,
    DeepSeek-V2) unless `group_top_k` says otherwise."""

    bias: bool = False  # whether the logits have a bias


@dataclass(frozen=True)
class SigmoidRouting(Routing, kind="sigmoid"):
    """Scores are sigmoids. A routing bias, which balances the load and is not trained by gradient, is added to the
    scores for the selection of experts, not for their weights. The score of a group of experts is the sum of its best
    two scores (DeepSeek-V3, section 2.1.2) unless `group_top_k` says otherwise."""

    selection_bias: bool = True  # a bias per expert is added to the scores for the selection, not for the weights
    bias_on: Literal["scores", "logits"] = "scores"  # values to which the routing bias is added (Kolibri: logits)
