"""Load balancing: gives the experts of a mixture about equal numbers of tokens.

Shapes: X experts, K experts per token, N tokens.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from onward.model.decoder import Decoder
from onward.model.experts import ExpertsModule

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


class Balance:
    """Counts the tokens that a decoder's routers assign to each expert in training, and balances the experts.

    Routers with a routing bias, usually sigmoid routers, are balanced by updates of this bias (DeepSeek-V3, DeepSeek-AI
    2024, section 2.1.2), other routers by an auxiliary loss (Switch Transformer, Fedus et al. 2021, section 2.2).
    `counts` holds, for each layer with experts, the number of assignments to each expert (X,) since the last `step`,
    which sums these numbers over the processes of a run. In a pipeline, only the layers of this process's stage are
    counted; `layers` lists the layers of all stages.
    """

    def __init__(self, model: Decoder, loss: float, bias: float, processes: "Processes | None" = None) -> None:
        """`loss` is the weight of the auxiliary loss, `bias` the change of a routing bias per step; 0: off.
        `processes` is the group that trains the model."""
        self.bias, self.processes = bias, processes
        mlps = {layer: getattr(block, "mlp", None) for layer, block in enumerate(model.blocks)}
        self.routers: dict[int, Any] = {
            layer: mlp.router for layer, mlp in mlps.items() if isinstance(mlp, ExpertsModule)
        }
        self.counts = [
            torch.zeros(len(router.weight), dtype=torch.long, device=router.weight.device)
            for router in self.routers.values()
        ]
        names = dict(processes.whole_parameters(model) if processes else model.named_parameters())
        self.layers = [int(name.split(".")[1]) for name in names if name.endswith(".mlp.router.weight")]
        with_loss = [layer for layer in self.layers if f"blocks.{layer}.mlp.router.routing_bias" not in names]
        own = sum(layer in self.routers for layer in with_loss)
        self.loss = loss * own / max(1, len(with_loss))  # the stages sum to a mean over all layers
        self.assignments: list[Tensor] = []  # (X,) for each layer with an auxiliary loss
        self.shares: list[Tensor] = []  # mean probabilities, (X,), for the same layers
        for router, counts in zip(self.routers.values(), self.counts):
            has_loss = bool(loss) and not is_biased(router)
            router.register_forward_hook(partial(self.watch, counts, has_loss))
            if has_loss:
                router.scoring.register_forward_hook(self.watch_shares)

    def watch(self, counts: Tensor, has_loss: bool, router: nn.Module, _: Any, output: tuple[Tensor, Tensor]) -> None:
        """Add the expert assignments of one forward pass of a router in training to `counts` (X,) and, with `has_loss`,
        record them for the auxiliary loss. This is a forward hook; `output` is the router's (weights, experts)."""
        if learning(router):
            assignments = torch.bincount(output[1].flatten(), minlength=len(counts))
            counts += assignments
            if has_loss:
                self.assignments.append(assignments)

    def watch_shares(self, module: nn.Module, _: Any, shares: Tensor) -> None:
        """Forward hook: record the mean of `shares` (N, X) over the tokens; the shares are a router's probabilities:
        its softmax, or its sigmoids divided by their sum."""
        if learning(module):
            if isinstance(module, nn.Sigmoid):
                shares = shares / shares.sum(-1, keepdim=True)
            self.shares.append(shares.mean(0))

    def auxiliary(self) -> Tensor | float:
        """Return the auxiliary loss of the forward passes in training since the last call, with gradient; 0 if no
        router has an auxiliary loss.

        The auxiliary loss is loss * X * sum over experts of f * P, averaged over the layers, where `loss` is its
        weight, f an expert's share of the assignments, and P the expert's mean probability in the router's softmax (or
        normalized sigmoids). It equals `loss` if all experts have the same share.
        """
        # sum over the tokens of the context axis
        if self.processes and self.processes.context is not None and self.assignments:
            assignments = torch.cat(self.assignments)
            distributed.all_reduce(assignments, group=self.processes.context)
            self.assignments = [*assignments.split([len(f) for f in self.assignments])]
        terms = [len(f) * (f.to(p.dtype) / f.sum() * p).sum() for f, p in zip(self.assignments, self.shares)]
        self.assignments.clear()
        self.shares.clear()
        return self.loss * torch.stack(terms).mean() if terms else 0.0

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Raise the routing bias of experts with fewer assignments than the mean, lower that of the other experts,
        reset the counts, and return the `loads` from before the reset."""
        if self.processes:
            self.processes.sum_tensors(self.counts)
        figures = self.loads()
        for router, counts in zip(self.routers.values(), self.counts):
            if is_biased(router):
                load = counts.float()
                bias: Tensor = router.routing_bias
                change = (load.mean() - load).sign()
                if self.processes:
                    bias, change = self.processes.local(bias), self.processes.part_of(change, bias)
                bias.add_(change, alpha=self.bias)
        self.clear()
        return figures

    def clear(self) -> None:
        """Forget all forward passes since the last `step`."""
        self.assignments.clear()
        self.shares.clear()
        for counts in self.counts:
            counts.zero_()

    def loads(self) -> dict[str, float]:
        """Return, as `expert_load/LAYER` for each layer with experts, the largest count of an expert divided by the
        mean count, since the last `step`; {} without experts."""
        if not self.layers:
            return {}
        ratios = [counts.max() / counts.float().mean() for counts in self.counts]
        own = dict(zip(self.routers, torch.stack(ratios).tolist() if ratios else ()))
        loads = [own.get(layer, 0.0) for layer in self.layers]
        loads = self.processes.sum_of_stages(loads) if self.processes else loads
        return {f"expert_load/{layer}": load for layer, load in zip(self.layers, loads)}

    def state(self) -> dict[str, Tensor]:
        """Return the routing biases that `step` changes, named as in a TrainerState."""
        biased = {layer: router for layer, router in self.routers.items() if self.bias and is_biased(router)}
        return {f"weight/blocks.{layer}.mlp.router.routing_bias": one.routing_bias for layer, one in biased.items()}


def is_biased(router: nn.Module) -> bool:
    return getattr(router, "routing_bias", None) is not None


def learning(module: nn.Module) -> bool:
    """Whether this forward pass belongs to training and is not a recomputation of activations in the backward pass."""
    return module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
