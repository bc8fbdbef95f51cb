"""Keeping the experts of a mixture equally busy.

Shapes: X experts, K experts per token, N tokens.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onward.model.decoder import Decoder
from onward.model.experts import ExpertsModule, SigmoidRoutingModule


class Balance:
    """Watches which experts a decoder's tokens visit while it trains, and evens the visits out.

    Softmax routers get an auxiliary loss (Switch Transformer, Fedus et al. 2021, section 2.2), sigmoid routers a
    correction of their choice (DeepSeek-V3, DeepSeek-AI 2024, section 2.1.2). A decoder without experts is left alone.
    `counts` are the visits (X,) in each layer with experts since the last `step`; several processes may sum them.
    """

    def __init__(self, model: Decoder, loss: float, bias: float) -> None:
        """`loss` weighs the auxiliary loss, `bias` is how far a correction moves in a step; 0 turns each off."""
        self.loss, self.bias = loss, bias
        mlps = {layer: getattr(block, "mlp", None) for layer, block in enumerate(model.blocks)}
        self.routers: dict[int, Any] = {
            layer: mlp.router for layer, mlp in mlps.items() if isinstance(mlp, ExpertsModule)
        }
        self.counts = [
            torch.zeros(len(router.weight), dtype=torch.long, device=router.weight.device)
            for router in self.routers.values()
        ]
        self.visits: list[Tensor] = []  # (X,) for each layer that the loss helps, and its mean shares, (X,)
        self.shares: list[Tensor] = []
        for router, counts in zip(self.routers.values(), self.counts):
            helped = bool(loss) and not isinstance(router, SigmoidRoutingModule)
            router.register_forward_hook(partial(self.watch, counts, helped))
            if helped:
                router.scoring.register_forward_hook(self.watch_shares)

    def watch(self, counts: Tensor, helped: bool, router: nn.Module, _: Any, output: tuple[Tensor, Tensor]) -> None:
        """Count the visits of a forward."""
        if learning(router):
            visits = torch.bincount(output[1].flatten(), minlength=len(counts))
            counts += visits
            if helped:
                self.visits.append(visits)

    def watch_shares(self, module: nn.Module, _: Any, shares: Tensor) -> None:
        """Keep the mean of a softmax's output (N, X)."""
        if learning(module):
            self.shares.append(shares.mean(0))

    def auxiliary(self) -> Tensor | float:
        """The auxiliary loss of the forwards in training mode since the last call, with gradient; 0 if there is none.

        loss * X * sum over experts of f * P, averaged over the layers: f is an expert's share of the visits, P its mean
        share in the softmax. It is `loss` where the experts are visited alike.
        """
        terms = [len(f) * (f.to(p.dtype) / f.sum() * p).sum() for f, p in zip(self.visits, self.shares)]
        self.visits.clear()
        self.shares.clear()
        return self.loss * torch.stack(terms).mean() if terms else 0.0

    @torch.no_grad()
    def step(self) -> None:
        """Move the corrections in favor of the experts visited less than the mean, and count anew."""
        for router, counts in zip(self.routers.values(), self.counts):
            if isinstance(router, SigmoidRoutingModule):
                visits = counts.float()
                router.routing_bias.add_((visits.mean() - visits).sign(), alpha=self.bias)
            counts.zero_()

    def loads(self) -> dict[str, float]:
        """For each layer with experts, the visits to the busiest one over the mean, since the last `step`."""
        if not self.counts:
            return {}
        ratios = torch.stack([counts.max() / counts.float().mean() for counts in self.counts])
        return {f"expert_load/{layer}": ratio for layer, ratio in zip(self.routers, ratios.tolist())}


def learning(module: nn.Module) -> bool:
    """Whether a forward is one of training, and not its repetition in the backward."""
    return module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
