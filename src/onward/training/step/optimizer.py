"""Optimizers: AdamW, Muon, and those of libraries."""

import importlib
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from onward.base.errors import UserError
from onward.parallel.parts import all_gathered, full_tensor, local, part_of, whole_parameters


def optimizers(
    model: nn.Module,
    name: str,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    rates: Mapping[str, float] = {},
    processes: tuple[int, int] = (0, 1),
    group: distributed.ProcessGroup | None = None,
) -> list[torch.optim.Optimizer]:
    """Make the optimizers for a decoder's trainable parameters: a list of one or two.

    `name` is "adamw" (Loshchilov and Hutter 2019); "muon", with AdamW for embeddings, head and vectors; or
    "module:Class", any torch.optim.Optimizer of a library. The first of `betas` is also Muon's momentum: in short runs,
    0.9 leads to lower losses than 0.95, Muon's usual value. Weight decay applies to matrices and stacks of matrices,
    not to vectors. Raises a UserError for any other name.

    `rates` are factors of AdamW's learning rate by parameter name (default 1), stored in the parameter groups as
    "rate". For matrices that Muon trains, the square root of the factor is used, since Muon's updates grow with the
    square root of the width and AdamW's with the width. `processes` is (rank of this process, number of processes that
    train the model, or one stage of it), and `group` is their process group, by default that of all processes.
    """
    trained = {name: p for name, p in whole_parameters(model).items() if p.requires_grad}
    if name == "adamw":
        return [adamw(trained, learning_rate, weight_decay, betas, rates)]
    if name == "muon":
        hidden = {n: p for n, p in trained.items() if n.startswith("blocks.") and is_matrix(n, p)}
        rest = {n: p for n, p in trained.items() if n not in hidden}
        roots = {name: rate**0.5 for name, rate in rates.items()}
        rank, count = processes
        groups = parameter_groups(hidden, weight_decay, roots)
        muon = Muon(groups, learning_rate, weight_decay, betas[0], rank=rank, count=count, group=group)
        return [muon, adamw(rest, learning_rate, weight_decay, betas, rates)]
    cls = library_class(name)
    options: dict[str, Any] = {"betas": betas} if "betas" in inspect.signature(cls).parameters else {}
    try:
        return [cls(parameter_groups(trained, weight_decay, rates), lr=learning_rate, **options)]
    except (TypeError, ValueError) as error:
        raise UserError(f"the optimizer {name} does not take the arguments (parameters, lr, betas): {error}") from None


def adamw(
    parameters: dict[str, Tensor],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    rates: Mapping[str, float] = {},
) -> torch.optim.AdamW:
    """Make torch's fused AdamW for parameters, given by name; `rates` are factors of the learning rate by parameter
    name, default 1."""
    groups = parameter_groups(parameters, weight_decay, rates)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def parameter_groups(
    parameters: dict[str, Tensor], weight_decay: float, rates: Mapping[str, float] = {}
) -> list[dict[str, Any]]:
    """Return the groups of parameters for a torch optimizer: by weight decay, which vectors do not have, and by "rate",
    the factor of the learning rate from `rates` (by parameter name, default 1). The decay per step, learning rate times
    weight decay, does not depend on the factor. Parameters on the meta device, those of other pipeline stages, are left
    out; their groups are kept, so that all stages have the same groups."""
    groups = defaultdict[tuple[bool, float], list[Tensor]](list)
    for name, parameter in parameters.items():
        groups[is_matrix(name, parameter), rates.get(name, 1.0)] += [parameter] * (not parameter.is_meta)
    return [
        {"params": members, "weight_decay": weight_decay / rate if matrix else 0.0, "rate": rate}
        for (matrix, rate), members in groups.items()
    ]


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix or a stack of matrices; the biases of experts are a stack of vectors."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def check_optimizer(name: str) -> None:
    """Raise a UserError if `optimizers` cannot make the optimizer `name`."""
    if name not in ("adamw", "muon"):
        library_class(name)


def library_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the optimizer class named by "module:Class". Raises a UserError if it cannot be imported, or is not an
    optimizer."""
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UserError(f"optimizer is {name!r}: choose adamw, muon, or a library's class, such as torch.optim:NAdam")
    try:
        cls = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise UserError(f"the optimizer {name} cannot be imported: {error}") from None
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UserError(f"{name} is not an optimizer: name a class that is a torch.optim.Optimizer")
    return cls


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
        rank: int = 0,
        count: int = 1,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        """`rank` is the number of this process among the `count` of a process group, which all make the same updates:
        each orthogonalizes some of the matrices, and shares them."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.rank, self.count, self.group = rank, count, group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one update, with Nesterov momentum. Matrices of the same shape, or its transpose, are orthogonalized
        together."""
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
        """Yield this process's part of the orthogonalized update of each parameter in `pairs`, (parameter, this
        process's part of its update). All parameters have the same `shape`, in which dimensions are swapped if
        necessary so that rows are at most columns. The processes share the work."""
        own = []
        for i, (p, part) in enumerate(pairs):
            full = full_tensor(part, p)
            if i % self.count == self.rank:
                own.append(wide(full))
        done = orthogonalized(torch.stack(own).flatten(0, -3)).unflatten(0, (len(own), *shape[:-2])) if own else []
        for i, (p, part) in enumerate(pairs):
            turn, owner = divmod(i, self.count)
            if owner == 0:
                mine = done[turn] if turn < len(done) else part.new_zeros(shape)
                shared = all_gathered(mine, self.count, self.group)
            full = shared[owner]
            yield part_of(full.mT if p.size(-2) > p.size(-1) else full, p)


def wide(matrices: Tensor) -> Tensor:
    """Return matrices (..., O, I), transposed if they have more rows than columns (O > I)."""
    return matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices (X, O, I), O at most I, with their singular values moved near 1, in bf16.

    Makes five steps of Newton-Schulz with the coefficients of Jordan et al., which leave values between about 0.7 and
    1.2.
    """
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x
