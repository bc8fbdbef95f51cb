"""A mixture of experts: a router sends each token to a few of many gated feed-forwards and mixes their answers.

Shapes: N tokens, D d_model, F width of an expert, X experts, A active experts per token.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.model.config import DecoderConfig, Experts
from onward.model.feedforward import ACTIVATIONS, GatedModule
from onward.model.norms import working_dtype
from onward.timing import fastest


class ExpertsModule(nn.Module):
    """x (..., D) -> (..., D). The experts' weights are stacks: gate and up (X, F, D), down (X, D, F)."""

    def __init__(self, part: Experts, config: DecoderConfig) -> None:
        super().__init__()
        self.part, self.act = part, ACTIVATIONS[part.act]
        d_ff = part.d_ff or config.d_ff
        self.router = nn.Linear(config.d_model, part.count, bias=False)
        self.gate = nn.Parameter(torch.empty(part.count, d_ff, config.d_model))
        self.up = nn.Parameter(torch.empty(part.count, d_ff, config.d_model))
        self.down = nn.Parameter(torch.empty(part.count, config.d_model, d_ff))
        self.shared = GatedModule(config.d_model, part.shared * d_ff, part.act, False, 0.0) if part.shared else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weight, chosen = self.route(tokens)
        y = self.mix(tokens, weight, chosen)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return self.dropout(y.view_as(x))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which experts each token (N, D) visits and with what weight, both (N, A)."""
        scores = self.router(tokens)
        weight, chosen = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).topk(
            self.part.active
        )
        if self.part.renormalize:
            weight = weight / weight.sum(-1, keepdim=True)
        return weight, chosen

    def mix(self, tokens: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' answers, (N, D)."""
        order = chosen.flatten().argsort(stable=True)  # visits, sorted by expert
        visitor = order // chosen.size(1)
        counts = torch.bincount(chosen.flatten(), minlength=self.part.count)
        dtype = working_dtype(tokens)
        stacks = self.gate.to(dtype), self.up.to(dtype), self.down.to(dtype)
        way: str = self.part.compute
        if way == "auto":
            way = fastest_way(tuple(self.gate.shape), tokens.device.type, dtype, 1 << len(order).bit_length())
        answers = WAYS[way](tokens[visitor].to(dtype), counts, *stacks, self.act)
        answers = answers * weight.flatten()[order, None].type_as(answers)
        return torch.zeros_like(tokens, dtype=dtype).index_add(0, visitor, answers)


Act = Callable[[Tensor], Tensor]


def loop(visits: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: Act) -> Tensor:
    """Expert by expert: visits (N, D) are sorted by expert, of which `counts` (X,) tells how many each has."""
    groups = enumerate(visits.split(counts.tolist()))
    return torch.cat([(act(x @ gate[e].mT) * (x @ up[e].mT)) @ down[e].mT for e, x in groups if len(x)])


def grouped(visits: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: Act) -> Tensor:
    """All experts in one product each for gate, up and down."""
    ends = counts.cumsum(0).int()
    return product(act(product(visits, gate, ends)) * product(visits, up, ends), down, ends)


def product(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Rows of x (N, I) up to each end times that expert's matrix of the stack (X, O, I): (N, O)."""
    out, unit = stack.size(1), 16 // x.element_size()  # the kernel wants rows of whole 16 bytes
    wide, long = -x.size(1) % unit, -out % unit
    y = F.grouped_mm(F.pad(x, (0, wide)), F.pad(stack, (0, wide, 0, long)).mT, offs=ends)
    return y[:, :out]


WAYS = {"loop": loop, "grouped": grouped}


@cache
def fastest_way(shape: tuple[int, int, int], device: str, dtype: torch.dtype, visits: int) -> str:
    """`loop` or `grouped`, timed forward and backward once per process for a stack shape and a number of visits."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):  # there is no grouped product in fp64
        return "loop"
    experts, d_ff, width = shape
    with torch.inference_mode(False), torch.enable_grad(), torch.device(device), torch.autocast(device, enabled=False):
        x = torch.ones(visits, width, dtype=dtype, requires_grad=True)
        ins = torch.ones(2, experts, d_ff, width, dtype=dtype, requires_grad=True)
        down = torch.ones(experts, width, d_ff, dtype=dtype, requires_grad=True)
        counts = torch.arange(visits) % experts
        counts = torch.bincount(counts, minlength=experts)

        def run(way: str) -> None:
            y = WAYS[way](x, counts, ins[0], ins[1], down, F.silu)
            torch.autograd.grad((y * y).sum(), (x, ins, down))
            if device == "cuda":
                torch.cuda.synchronize()

        return fastest({way: partial(run, way) for way in WAYS})
