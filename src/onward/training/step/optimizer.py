"""Optimizers: AdamW, Muon, NorMuon, and optimizers from other libraries."""

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.config.optimizers import MATRIX_OPTIMIZERS
from onward.planning.optimizers import library_class
from onward.training.step.muon import Muon
from onward.training.step.normuon import NorMuon

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


def optimizers(
    model: nn.Module,
    name: str,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    rates: Mapping[str, float] = {},
    processes: "Processes | None" = None,
) -> list[torch.optim.Optimizer]:
    """Make the optimizers for a decoder's trainable parameters: a list of one or two, each with parameters.

    `name` is "adamw" (Loshchilov and Hutter 2019); "muon" or "normuon", with AdamW for embeddings, head and vectors;
    or "module:Class", any torch.optim.Optimizer of a library. The first of `betas` is also Muon's momentum: in short
    runs, 0.9 leads to lower losses than 0.95, Muon's usual value. Weight decay applies to matrices and stacks of
    matrices, not to vectors. Raises a UserError for any other name, and if all parameters are frozen.

    `rates` are factors of AdamW's learning rate by parameter name (default 1), stored in the parameter groups as
    "rate". For matrices that Muon trains, the square root of the factor is used, since the spectral norm of Muon's
    updates grows with the square root of the width, and that of AdamW's with the width. `processes` is the group that
    trains the model.
    """
    every = processes.whole_parameters(model) if processes else dict(model.named_parameters())
    trained: dict[str, Tensor] = {name: p for name, p in every.items() if p.requires_grad}
    if not trained:
        raise UserError(
            "Cannot make an optimizer, because all parameters are frozen: set requires_grad of some to True"
        )
    if name == "adamw":
        return [adamw(trained, learning_rate, weight_decay, betas, rates)]
    if name in MATRIX_OPTIMIZERS:
        hidden = {n: p for n, p in trained.items() if n.startswith(("blocks.", "draft_head.")) and is_matrix(n, p)}
        rest = {n: p for n, p in trained.items() if n not in hidden}
        roots = {name: rate**0.5 for name, rate in rates.items()}
        groups = parameter_groups(hidden, weight_decay, roots)
        cls = NorMuon if name == "normuon" else Muon
        made: list[torch.optim.Optimizer] = []
        if groups:
            made.append(cls(groups, learning_rate, weight_decay, betas[0], processes=processes))
        return [*made, adamw(rest, learning_rate, weight_decay, betas, rates)] if rest else made
    library: Any = library_class(name)
    options: dict[str, Any] = {"betas": betas} if "betas" in inspect.signature(library).parameters else {}
    try:
        return [library(parameter_groups(trained, weight_decay, rates), lr=learning_rate, **options)]
    except (TypeError, ValueError) as error:
        raise UserError(f"the optimizer {name} does not take the arguments (parameters, lr, betas): {error}") from None


def adamw(
    parameters: dict[str, Tensor],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    rates: Mapping[str, float] = {},
) -> torch.optim.AdamW:
    groups = parameter_groups(parameters, weight_decay, rates)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def parameter_groups(
    parameters: dict[str, Tensor], weight_decay: float, rates: Mapping[str, float] = {}
) -> list[dict[str, Any]]:
    """Return the parameter groups for a torch optimizer: by weight decay (none for vectors) and by "rate", the factor
    of the learning rate from `rates` (by parameter name, default 1). The decay per step, learning rate times weight
    decay, does not depend on the factor. Parameters on the meta device (of other pipeline stages) are left out, but
    their groups are kept, so that all stages have the same groups."""
    groups = defaultdict[tuple[bool, float], list[Tensor]](list)
    for name, parameter in parameters.items():
        groups[is_matrix(name, parameter), rates.get(name, 1.0)] += [parameter] * (not parameter.is_meta)
    return [
        {"params": members, "weight_decay": weight_decay / rate if matrix else 0.0, "rate": rate}
        for (matrix, rate), members in groups.items()
    ]


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix or a stack of matrices. The biases of experts and the convolution kernels of
    recurrent layers, (channels, 1, kernel size), count as stacks of vectors."""
    return parameter.ndim >= 2 and not name.endswith(("bias", "conv.weight"))


def check_optimizer(name: str) -> None:
    """Raise a UserError if `optimizers` cannot make the optimizer `name`."""
    if name != "adamw" and name not in MATRIX_OPTIMIZERS:
        library_class(name)
