"""A mixture of experts: a router sends each token to a few of many gated feed-forwards and mixes their answers.

Shapes: N tokens, D d_model, F width of an expert, X experts, A active experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from onward.model.config import Activation, DecoderConfig, Experts
from onward.model.feedforward import ACTIVATIONS, GatedModule
from onward.model.norms import working_dtype
from onward.model.routing import Router
from onward.timing import fastest


class SoftmaxModule(nn.Module):
    """Tokens (N, D) -> the weights and the numbers of the experts they visit, both (N, A). In at least fp32."""

    best = 1  # this many of a group's experts tell how good it is

    def __init__(self, part: Router, width: int, experts: int, active: int, bias: bool = False) -> None:
        super().__init__()
        self.part, self.active = part, active
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.bias = nn.Parameter(torch.zeros(experts)) if bias else None
        self.shares: nn.Module = nn.Softmax(-1)  # scores (N, X) -> the weights that experts would have

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(exact)
            shares = self.shares(F.linear(tokens.to(exact), self.weight.to(exact), bias))
            chosen = self.allowed(self.merit(shares)).topk(self.active).indices
            weight = shares.gather(1, chosen)
            if self.part.renormalize:
                weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
            return weight * self.part.scale, chosen

    def merit(self, shares: Tensor) -> Tensor:
        """What experts are chosen by, (N, X)."""
        return shares

    def allowed(self, merit: Tensor) -> Tensor:
        """-inf for the experts outside the best groups."""
        if self.part.groups == self.part.active_groups:
            return merit
        grouped = merit.unflatten(1, (self.part.groups, -1))
        group = grouped.topk(min(self.best, grouped.size(-1))).values.sum(-1)
        shut = torch.ones_like(group, dtype=torch.bool).scatter(1, group.topk(self.part.active_groups).indices, False)
        return grouped.masked_fill(shut[..., None], -math.inf).flatten(1)


class SigmoidModule(SoftmaxModule):
    """Every expert is scored by itself, and a correction helps those that are visited too rarely."""

    best = 2

    def __init__(self, part: Router, width: int, experts: int, active: int) -> None:
        super().__init__(part, width, experts, active)
        self.correction = nn.Parameter(torch.zeros(experts), requires_grad=False)
        self.shares = nn.Sigmoid()

    def merit(self, shares: Tensor) -> Tensor:
        return shares + self.correction


class SharedExpert(GatedModule):
    """A feed-forward that every token visits, weighted by a learned share of the token."""

    def __init__(self, width: int, d_ff: int, act: Activation) -> None:
        super().__init__(width, d_ff, act, False, 0.0)
        self.share = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.share(x).sigmoid() * super().forward(x)


class ExpertsModule(nn.Module):
    """x (..., D) -> (..., D). The experts' weights are stacks: gate and up (X, F, D), down (X, D, F)."""

    def __init__(self, part: Experts, config: DecoderConfig) -> None:
        super().__init__()
        self.part, self.act = part, ACTIVATIONS[part.act]
        d_ff, width = part.d_ff or config.d_ff, config.d_model
        self.router = part.router.build(width, part.count, part.active)
        self.gate = nn.Parameter(torch.empty(part.count, d_ff, width))
        self.up = nn.Parameter(torch.empty(part.count, d_ff, width))
        self.down = nn.Parameter(torch.empty(part.count, width, d_ff))
        for name, rows in {"gate": d_ff, "up": d_ff, "down": width}.items():
            bias = nn.Parameter(torch.zeros(part.count, rows)) if part.bias else None
            self.register_parameter(f"{name}_bias", bias)
        self.shared: GatedModule | None = None
        if part.d_shared:
            self.shared = (
                SharedExpert(width, part.d_shared, part.act)
                if part.shared_gate
                else GatedModule(width, part.d_shared, part.act, False, 0.0)
            )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        y = self.mix(tokens)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return self.dropout(y.view_as(x))

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """What goes into the last projection."""
        return self.act(gate) * up

    def mix(self, tokens: Tensor) -> Tensor:
        """The weighted sum of the answers of the experts that each token is sent to, (N, D)."""
        weight, chosen = self.router(tokens)
        order = chosen.flatten().argsort(stable=True)  # visits, sorted by expert
        visitor = order // chosen.size(1)
        counts = torch.bincount(chosen.flatten(), minlength=self.part.count)
        dtype = working_dtype(tokens)
        gate, up, down = (self.stack(name, dtype) for name in ("gate", "up", "down"))
        visits = tokens[visitor].to(dtype)
        way: str = self.part.compute
        if way == "auto":
            way = fastest_way(visits, counts, gate, up, down, self.combine)
        answers = WAYS[way](visits, counts, gate, up, down, self.combine)
        answers = answers * weight.flatten()[order, None].type_as(answers)
        return torch.zeros_like(tokens, dtype=dtype).index_add(0, visitor, answers)

    def stack(self, name: str, dtype: torch.dtype) -> Stack:
        """The weights and, where there are any, the biases of one projection of all experts."""
        bias = getattr(self, f"{name}_bias")
        return getattr(self, name).to(dtype), None if bias is None else bias.to(dtype)


Stack = tuple[Tensor, Tensor | None]  # weights (X, O, I), biases (X, O)
Combine = Callable[[Tensor, Tensor], Tensor]


def loop(visits: Tensor, counts: Tensor, gate: Stack, up: Stack, down: Stack, combine: Combine) -> Tensor:
    """Expert by expert: visits (N, D) are sorted by expert, of which `counts` (X,) tells how many each has."""

    def each(stack: Stack) -> zip[tuple[Tensor, Tensor | None]]:
        return zip(stack[0].unbind(), repeat(None) if stack[1] is None else stack[1].unbind())

    groups = zip(visits.split(counts.tolist()), each(gate), each(up), each(down))
    return torch.cat([F.linear(combine(F.linear(x, *g), F.linear(x, *u)), *d) for x, g, u, d in groups if len(x)])


def grouped(visits: Tensor, counts: Tensor, gate: Stack, up: Stack, down: Stack, combine: Combine) -> Tensor:
    """All experts in one product each for gate, up and down."""

    def project(x: Tensor, stack: Stack) -> Tensor:
        y = product(x, stack[0], counts.cumsum(0).int())
        return y if stack[1] is None else y + stack[1].repeat_interleave(counts, 0)

    return project(combine(project(visits, gate), project(visits, up)), down)


def product(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Rows of x (N, I) up to each end times that expert's matrix of the stack (X, O, I): (N, O)."""
    out, unit = stack.size(1), 16 // x.element_size()  # the kernel wants rows of whole 16 bytes
    wide, long = -x.size(1) % unit, -out % unit
    if wide or long:  # no padding is a copy all the same
        x, stack = F.pad(x, (0, wide)), F.pad(stack, (0, wide, 0, long))
    return F.grouped_mm(x, stack.mT, offs=ends)[:, :out]


WAYS = {"loop": loop, "grouped": grouped}
FASTEST: dict[tuple[object, ...], str] = {}  # the ways found so far


def fastest_way(visits: Tensor, counts: Tensor, gate: Stack, up: Stack, down: Stack, combine: Combine) -> str:
    """`loop` or `grouped`, timed once per process for a shape of the stacks and a number of visits, with gradients
    where they are asked for. It takes the weights as they are: a copy might not fit."""
    if visits.dtype not in (torch.float32, torch.bfloat16, torch.float16):  # there is no grouped product in fp64
        return "loop"
    learning = torch.is_grad_enabled()
    kind = visits.device, visits.dtype, gate[0].shape, len(visits).bit_length(), learning
    if kind not in FASTEST:
        x, *weights = leaves = [t.detach().requires_grad_(learning) for t in (visits, gate[0], up[0], down[0])]
        gate, up, down = ((weight, stack[1]) for weight, stack in zip(weights, (gate, up, down)))

        def run(way: str) -> None:
            y = WAYS[way](x, counts, gate, up, down, combine)
            if learning:
                torch.autograd.grad(y, leaves, y.detach())
            if y.is_cuda:
                torch.cuda.synchronize()

        with saved_tensors_hooks(lambda t: t, lambda t: t):  # whoever recomputes activations must not see these
            FASTEST[kind] = fastest({way: partial(run, way) for way in WAYS})
    return FASTEST[kind]
