"""AdamW (Loshchilov and Hutter 2019) for all tensors of an optimizer, in one pass over their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onward.kernels import rules
from onward.kernels.available import unavailable
from onward.kernels.memory import Unreadable, address, filled
from onward.kernels.rules import emitter, is_watched

MOMENTS = "exp_avg", "exp_avg_sq"
UNUSUAL = "amsgrad", "maximize", "capturable", "differentiable"  # options of torch's AdamW that the kernel lacks


def update(groups: Sequence[dict[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    """Update parameters as the `step` of torch's AdamW does, given its groups and state. Returns False, with nothing
    changed, where the kernel cannot: before the first step has made the state, for tensors that are not in fp32 on a
    CPU, and for few numbers."""
    members = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
    if sum(p.numel() for p, _ in members) < rules.MIN_PARALLEL or is_watched() or unavailable():
        return False
    if any(group[option] for group in groups for option in UNUSUAL):
        return False
    kernels, items = emitter("adamw"), 0
    steps, changed, tensors, factors = list[Tensor](), list[Tensor](), list[int](), list[float]()
    try:
        for p, group in members:
            step, moments = state[p]["step"], [state[p][name] for name in MOMENTS]
            address(step, torch.float32)  # which checks that it is a number on the CPU
            tensors += (address(x, torch.float32, *p.shape) for x in (p, p.grad, *moments))
            tensors += p.numel(), items
            factors += factors_of(group, float(step) + 1)
            items += -(-p.numel() // kernels.BLOCK)
            steps.append(step)
            changed += p, *moments
    except (KeyError, Unreadable):
        return False
    torch._foreach_add_(steps, 1)
    (_table, of_tensors), (_factors, of_factors) = filled(tensors, torch.int64), filled(factors, torch.float32)
    kernels.adamw()(of_tensors, of_factors, len(members), items, torch.get_num_threads())
    increment_version(changed)
    return True


def factors_of(group: Mapping[str, Any], step: float) -> tuple[float, ...]:
    """Return the FACTORS of `llvm/adamw.py` for a parameter of a group in this step, counted from 1."""
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    root = (1 - beta2**step) ** -0.5
    return 1 - rate * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, rate / (1 - beta1**step), root, group["eps"]
