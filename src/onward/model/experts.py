"""A mixture of experts: a router assigns each token to k of many feed-forwards, whose weighted outputs are summed.

Shapes: N tokens, D d_model, F width of an expert, X experts, K experts per token (top_k), N K assignments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import repeat
from operator import mul

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from onward.base.timing import fastest
from onward.config.decoder import DecoderConfig, Experts
from onward.config.feedforward_parts import ActivationName
from onward.config.routing import Routing
from onward.kernels.chosen import takes_kernel
from onward.kernels.operations import ACTIVATIONS
from onward.kernels.recorded import is_recorded
from onward.model.activations import Activation, Child, Declarations, ExpertSteps, Output
from onward.model.adapters import adapted
from onward.model.layers import GatedFeedForwardModule, Linear, PlainFeedForwardModule, working_dtype
from onward.model.scales import Softcap


class SoftmaxRoutingModule(nn.Module):
    """The router of a mixture of experts, by a softmax over all experts: it takes tokens (N, D) and returns the weights
    (N, K) and ids (N, K) of each token's experts. Computed in at least fp32. With a selection bias, a bias per expert,
    not trained by gradient, is added to the scores for the selection only."""

    group_top_k = 1  # the score of a group is the sum of its greatest `group_top_k` scores

    def __init__(self, part: Routing, width: int, experts: int, top_k: int, bias: bool = False) -> None:
        super().__init__()
        self.part, self.top_k, self.group_top_k = part, top_k, part.group_top_k or self.group_top_k
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.bias = nn.Parameter(torch.zeros(experts)) if bias else None
        self.routing_bias = nn.Parameter(torch.zeros(experts), requires_grad=False) if part.selection_bias else None
        scoring = self.score()
        self.scoring = nn.Sequential(Softcap(part.softcap), scoring) if part.softcap else scoring

    def score(self) -> nn.Module:
        """Build the module that computes scores (N, X) from logits (N, X)."""
        return nn.Softmax(-1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(exact)
            logits = F.linear(tokens.to(exact), self.weight.to(exact), bias)
            scores = self.scoring(logits)
            experts = self.mask_groups(self.selection_scores(logits, scores)).topk(self.top_k).indices
            weights = scores.gather(1, experts)
            if self.part.renormalize:
                weights = weights / weights.sum(-1, keepdim=True).clamp(min=self.part.min_sum)  # sigmoids may all be 0
            return weights * self.part.scale, experts

    def selection_scores(self, logits: Tensor, scores: Tensor) -> Tensor:
        """The scores (N, X) by which experts are selected; weights come from the router's own `scores`."""
        return scores if self.routing_bias is None else scores + self.routing_bias

    def mask_groups(self, scores: Tensor) -> Tensor:
        """Return the selection scores (N, X), with -inf for experts outside each token's best groups of experts
        (DeepSeek's group-limited routing)."""
        if self.part.n_groups == self.part.top_k_groups:
            return scores
        grouped = scores.unflatten(1, (self.part.n_groups, -1))
        group = grouped.topk(min(self.group_top_k, grouped.size(-1))).values.sum(-1)
        mask = torch.full_like(group, -math.inf).scatter(1, group.topk(self.part.top_k_groups).indices, 0.0)
        return (grouped + mask[..., None]).flatten(1)


class SigmoidRoutingModule(SoftmaxRoutingModule):
    """The router of a mixture of experts by sigmoid scores."""

    group_top_k = 2

    def score(self) -> nn.Module:
        return nn.Sigmoid()


class LogitBiasRoutingModule(SigmoidRoutingModule):
    """The router of a mixture of experts by sigmoid scores, whose routing bias is added to the logits."""

    def selection_scores(self, logits: Tensor, scores: Tensor) -> Tensor:
        return super().selection_scores(logits, logits)


class GatedSharedExpertModule(GatedFeedForwardModule):
    """The shared expert of a mixture of experts: a feed-forward applied to all tokens, in addition to the routed
    experts. Its output is multiplied by sigmoid(share(x)), one number per token (Qwen2-MoE)."""

    def __init__(self, width: int, d_ff: int, act: ActivationName) -> None:
        super().__init__(width, d_ff, act, False, 0.0)
        self.share = Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.share(x).sigmoid() * super().forward(x)


class ExpertsModule(nn.Module):
    """A mixture of experts, x (..., D) -> (..., D). The experts' weights are stacks: gate and up (X, F, D), down (X, D,
    F); experts without a gate have no `gate`.

    The `router` is a module that returns, for tokens (N, D), the weights and the ids of their experts, both (N, K).
    """

    up: nn.Parameter
    down: nn.Parameter

    def __init__(self, part: Experts, config: DecoderConfig, router: nn.Module) -> None:
        super().__init__()
        self.part, self.act = part, ACTIVATIONS[part.act]
        d_ff, width = part.width(config), part.d_latent or config.d_model
        self.router = router
        self.inner = ("gate", "up") if part.gated else ("up",)  # the projections before `down`
        stacks = dict.fromkeys(self.inner, (d_ff, width)) | {"down": (width, d_ff)}
        for name, shape in stacks.items():
            self.register_parameter(name, nn.Parameter(torch.empty(part.count, *shape)))
        for name, (rows, _) in stacks.items():
            bias = nn.Parameter(torch.zeros(part.count, rows)) if part.bias else None
            self.register_parameter(f"{name}_bias", bias)
        self.shared = build_shared(part, config.d_model) if part.d_shared else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        y = self.mix(tokens)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return self.dropout(y.view_as(x))

    def combine(self, *inner: Tensor) -> Tensor:
        """The input of an expert's down projection, from the outputs of the projections `inner`."""
        own = self.part.combine
        return reduce(mul, inner[1:], self.act(inner[0])) if own is None else own(self.act, *inner)

    def mix(self, tokens: Tensor) -> Tensor:
        """Return the weighted sum (N, D) of the outputs of each token's experts, without the shared expert, for tokens
        (N, D)."""
        return self.mix_chosen(tokens, *self.router(tokens))

    def mix_chosen(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Compute `mix`, given the weights and ids (N, K) of each token's experts."""
        backend: str = self.part.backend
        if is_recorded() or (backend == "auto" and takes_kernel(tokens, experts, self.part.count)):
            return self.mix_by_kernel(tokens, weights, experts)
        order = experts.flatten().argsort(stable=True)  # indices of the assignments, sorted by expert
        token = order // experts.size(1)  # the token of each assignment
        counts = torch.bincount(experts.flatten(), minlength=self.part.count)
        dtype = working_dtype(tokens)
        inner, down = [self.stack(name, dtype) for name in self.inner], self.stack("down", dtype)
        assignments = tokens[token].to(dtype)
        if backend == "auto":
            backend = fastest_backend(assignments, counts, inner, down, self.combine)
        outputs = BACKENDS[backend](assignments, counts, inner, down, self.combine)
        outputs = outputs * weights.flatten()[order, None].type_as(outputs)
        return torch.zeros_like(tokens, dtype=dtype).index_add(0, token, outputs)

    def mix_by_kernel(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Compute `mix` for tokens (N, D), given the weights and ids (N, K) of their experts, by the operation
        `onward::chosen_linear`, which runs a CPU kernel and which compiled decoding steps can repeat."""
        ids, dtype = experts.flatten(), tokens.dtype

        def project(x: Tensor, name: str) -> Tensor:
            return torch.ops.onward.chosen_linear(x, ids, *self.stack(name, dtype))  # type: ignore[no-any-return]

        outputs = project(self.combine(*(project(tokens, name) for name in self.inner)), "down")
        outputs = outputs.view(*experts.shape, -1) * weights[..., None].type_as(outputs)
        return reduce(torch.add, outputs.unbind(1))

    def inward(self, tokens: Tensor) -> Tensor:
        """The inputs of the experts' projections, from tokens (N, D)."""
        return tokens

    def outward(self, y: Tensor) -> Tensor:
        """The addition to the residual stream (..., D), from outputs of experts."""
        return y

    def activations(self) -> Declarations:
        steps, count, top_k = ExpertSteps(), self.part.count, self.part.top_k
        units, width = self.up.size(1), self.up.size(2)
        names: Declarations = {}
        if hasattr(self.router, "scoring"):
            names["router.scores"] = Activation(steps, ("B", "T", count), 2, count)
        names["router.choices"] = Activation(steps, ("B", "T", top_k), None, count, editable=False)
        names["shares"] = Activation(steps, ("B", "T", count), 2, count)
        names["post"] = Activation(steps, ("B", "T", top_k, units), None, count)
        names["experts"] = Activation(steps, ("B", "T", top_k, width), 2, count)
        if self.shared is not None:
            names["shared"] = Child("shared", flat=True)
            names["shared.out"] = Activation(Output("shared", flat=True), ("B", "T", self.shared.down.out_features))
        return names

    def stack(self, name: str, dtype: torch.dtype) -> Stack:
        """The weights (X, O, I) of the projection "gate", "up" or "down" of all experts, and their biases (X, O)."""
        bias = getattr(self, f"{name}_bias")
        return adapted(self, name).to(dtype), None if bias is None else bias.to(dtype)


class InputWeightedExpertsModule(ExpertsModule):
    """A mixture of experts, x (..., D) -> (..., D), whose routing weights multiply the inputs of the experts, not the
    outputs."""

    def mix_chosen(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        scaled = (tokens[:, None] * weights[..., None].type_as(tokens)).flatten(0, 1)
        y = super().mix_chosen(scaled, torch.ones_like(weights).view(-1, 1), experts.view(-1, 1))
        return reduce(torch.add, y.unflatten(0, experts.shape).unbind(1))

    def activations(self) -> Declarations:
        # the units and outputs of single experts depend on weighted inputs, which tracing does not compute
        return {name: one for name, one in super().activations().items() if name not in ("post", "experts")}


class LatentExpertsModule(ExpertsModule):
    """A mixture of experts, x (..., D) -> (..., D), whose experts work on a projection (N, d_latent) of the tokens; the
    router and the shared expert see the tokens themselves."""

    def __init__(self, part: Experts, config: DecoderConfig, router: nn.Module) -> None:
        super().__init__(part, config, router)
        self.latent_in = Linear(config.d_model, part.d_latent, bias=False)
        self.latent_out = Linear(part.d_latent, config.d_model, bias=False)

    def mix_chosen(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return self.outward(super().mix_chosen(self.inward(tokens), weights, experts))

    def inward(self, tokens: Tensor) -> Tensor:
        return self.latent_in(tokens)  # type: ignore[no-any-return]

    def outward(self, y: Tensor) -> Tensor:
        return self.latent_out(y)  # type: ignore[no-any-return]

    def activations(self) -> Declarations:
        width = "B", "T", self.part.top_k, "D"
        return super().activations() | {"experts": Activation(ExpertSteps(), width, 2, self.part.count)}


def build_shared(part: Experts, width: int) -> PlainFeedForwardModule:
    """Build the shared expert of a mixture of experts: from (N, D) to (N, D), where D is `width`."""
    if part.shared_gate:
        return GatedSharedExpertModule(width, part.d_shared, part.act)
    kind = GatedFeedForwardModule if part.gated else PlainFeedForwardModule
    return kind(width, part.d_shared, part.act, False, 0.0)


Stack = tuple[Tensor, Tensor | None]  # weights (X, O, I), biases (X, O)
Combine = Callable[..., Tensor]


def loop(assignments: Tensor, counts: Tensor, inner: Sequence[Stack], down: Stack, combine: Combine) -> Tensor:
    """Compute the experts' outputs with one matmul per expert and projection. `inner`, (gate, up) or (up,), and `down`
    are the experts' projections, each a pair of weights and biases; `combine` computes the input of the down projection
    from the outputs of `inner`.

    `assignments` (N K, D) are the tokens' vectors, once for each of their K experts, sorted by expert; `counts` (X,) is
    the number of vectors of each expert. Returns (N K, D).
    """

    def each(stack: Stack) -> zip[tuple[Tensor, Tensor | None]]:
        return zip(stack[0].unbind(), repeat(None) if stack[1] is None else stack[1].unbind())

    groups = zip(assignments.split(counts.tolist()), zip(*map(each, inner)), each(down))
    return torch.cat([F.linear(combine(*(F.linear(x, *one) for one in i)), *d) for x, i, d in groups if len(x)])


def grouped(assignments: Tensor, counts: Tensor, inner: Sequence[Stack], down: Stack, combine: Combine) -> Tensor:
    """Compute the experts' outputs with one grouped matmul over all experts for each projection; arguments and result
    are those of `loop`."""

    def project(x: Tensor, stack: Stack) -> Tensor:
        y = grouped_matmul(x, stack[0], counts.cumsum(0).int())
        return y if stack[1] is None else y + stack[1].repeat_interleave(counts, 0)

    return project(combine(*(project(assignments, stack) for stack in inner)), down)


def grouped_matmul(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of x (N, I) that belong to expert e with matrix e of `stack` (X, O, I), for every e; return
    (N, O).

    Rows ends[e - 1] to ends[e] - 1 belong to expert e; `ends` is (X,), int32.
    """
    out, unit = stack.size(1), 16 // x.element_size()  # the kernel needs strides that are multiples of 16 bytes
    wide, long = -x.size(1) % unit, -out % unit
    if wide or long:  # F.pad copies even where it pads nothing
        x, stack = F.pad(x, (0, wide)), F.pad(stack, (0, wide, 0, long))
    return F.grouped_mm(x, stack.mT, offs=ends)[:, :out]


BACKENDS = {"loop": loop, "grouped": grouped}
FASTEST: dict[tuple[object, ...], str] = {}  # the name of the fastest backend, by device, dtype, shape and mode


def fastest_backend(assignments: Tensor, counts: Tensor, inner: Sequence[Stack], down: Stack, combine: Combine) -> str:
    """Return the faster of "loop" and "grouped", the two ways to compute the experts' outputs, for these arguments;
    "loop" for dtypes that grouped_mm does not support. They are timed once per process for each device, dtype, shape of
    the stacks and number of binary digits of the number of assignments, with the backward pass if gradients are
    enabled. The weights are timed in place, without a copy."""
    if assignments.dtype not in (torch.float32, torch.bfloat16, torch.float16):  # grouped_mm has no fp64
        return "loop"
    learning = torch.is_grad_enabled()
    stacks = [*inner, down]
    shape = assignments.device, assignments.dtype, down[0].shape, len(stacks), len(assignments).bit_length(), learning
    if shape not in FASTEST:
        x, *weights = leaves = [t.detach().requires_grad_(learning) for t in (assignments, *(s[0] for s in stacks))]
        *first, last = [(weight, stack[1]) for weight, stack in zip(weights, stacks)]

        def run(backend: str) -> None:
            y = BACKENDS[backend](x, counts, first, last, combine)
            if learning:
                torch.autograd.grad(y, leaves, y.detach())
            if y.is_cuda:
                torch.cuda.synchronize()

        with saved_tensors_hooks(lambda t: t, lambda t: t):  # activation checkpointing must not record these tensors
            FASTEST[shape] = fastest({backend: partial(run, backend) for backend in BACKENDS})
    return FASTEST[shape]
