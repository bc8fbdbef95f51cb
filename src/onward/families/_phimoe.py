"""The router of Phi-3.5-MoE. Shapes: N tokens, X experts."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.config.routing import Routing
from onward.model.experts import SoftmaxRoutingModule


class SparseMixerModule(SoftmaxRoutingModule):
    """The router of SparseMixer-v2 without the sampling of its training (Liu et al. 2024, arXiv:2409.12136): the two
    experts with the greatest logits. The routing weight of an expert is its value in a softmax over the logits near its
    own; for the second expert, the first is left out. With m the logit of the expert, logits z with (m - z) / max(|z|,
    m) > 2 `eps` are left out."""

    def __init__(self, part: Routing, width: int, experts: int, top_k: int, eps: float) -> None:
        super().__init__(part, width, experts, top_k)
        self.eps = eps

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.to(exact), self.weight.to(exact))
            first, weight = self.choose(logits, logits)
            second, other = self.choose(logits.scatter(1, first, -math.inf), logits)
            return torch.cat([weight, other], 1), torch.cat([first, second], 1)

    def choose(self, logits: Tensor, all_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the expert with the greatest logit in `logits` (N, X), some of which may be -inf, and its weight, both
        (N, 1)."""
        greatest, expert = logits.max(-1, keepdim=True)
        far = (greatest - all_logits) / torch.maximum(all_logits.abs(), greatest) > 2 * self.eps
        return expert, self.scoring(logits.masked_fill(far, -math.inf)).gather(1, expert)
