"""The optimizer Muon."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


class Muon(torch.optim.Optimizer):
    """Muon: each update is the momentum with all singular values set to about 1 (Jordan et al. 2024), for matrices (O,
    I) and, matrix by matrix, for stacks (X, O, I).

    The updates have the root mean square of AdamW's, so that both optimizers use the same learning rate and weight
    decay (Liu et al. 2025, section 2.2).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        *,
        processes: "Processes | None" = None,
    ) -> None:
        """The `processes` of a pipeline stage share the work: each orthogonalizes some of the matrices and sends the
        results to the others, so that all apply the same updates."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.processes = processes

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one update, with Nesterov momentum. Matrices of the same shape, up to transposition, are orthogonalized
        together."""
        local = self.processes.local if self.processes else Tensor.detach
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            alike = defaultdict[tuple[int, ...], list[tuple[Tensor, Tensor]]](list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                grad = local(p.grad)
                mean = local(state["momentum_buffer"]).lerp_(grad, 1 - momentum)
                alike[(*p.shape[:-2], *sorted(p.shape[-2:]))].append((p, grad.lerp(mean, momentum).bfloat16()))
            for shape, pairs in alike.items():
                weights = [local(p) for p, _ in pairs]
                torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
                parts = [part.to(w.dtype) for part, w in zip(self.updates(pairs, shape), weights)]
                torch._foreach_add_(weights, parts, alpha=-rate * 0.2 * math.sqrt(shape[-1]))

    def updates(self, pairs: Sequence[tuple[Tensor, Tensor]], shape: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield this process's shard of the orthogonalized update of each parameter in `pairs`, (parameter, this
        process's shard of the raw update). All parameters have the same `shape`, in which dimensions are swapped if
        necessary so that there are at most as many rows as columns."""

        def of_full(updates: Sequence[Tensor]) -> Tensor:
            done = orthogonalized(torch.stack([*map(wide, updates)]).flatten(0, -3))
            return done.unflatten(0, (len(updates), *shape[:-2]))

        processes = self.processes
        made = processes.shared_work(of_full, pairs, shape) if processes else of_full([update for _, update in pairs])
        for (p, _), update in zip(pairs, made):
            full = self.scaled(p, update.mT if p.size(-2) > p.size(-1) else update)
            yield processes.part_of(full, p) if processes else full

    def scaled(self, parameter: Tensor, update: Tensor) -> Tensor:
        """Return the full orthogonalized update of a parameter as it is applied; NorMuon scales its rows."""
        return update


def wide(matrices: Tensor) -> Tensor:
    """Return matrices (..., O, I); transposed if they have more rows than columns (O > I)."""
    return matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices (X, O, I), O at most I, with their singular values moved close to 1, in bf16.

    Makes five steps of Newton-Schulz with the coefficients of Jordan et al., which leave values between about 0.7 and
    1.2.
    """
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x
