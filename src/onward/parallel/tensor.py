"""Tensor parallelism over a finished decoder: each process computes some heads and some feed-forward units of every
layer (Shoeybi et al. 2019, Megatron-LM).

A branch (the attention or the feed-forward of a block) receives all tokens and returns a part of its output, which is
summed over the processes. In the backward pass, the gradient of its input is summed as well. Inside a branch, each
process has only one term of such a sum, so the gradients of parameters that every process has whole are also summed.
Between branches each process has a part of the tokens (`stream.py`). Each process computes the entire final norm; the
embedding and the head are divided if n divides the vocabulary (`vocabulary.py`).

Parameters are DTensors; while a module computes, it and its submodules see this process's part of each parameter as a
plain tensor under its name.

Shapes: B batch, T tokens, H heads, K key/value heads, E d_head, n processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from onward.base.errors import UserError
from onward.config.decoder import SelfAttention, at
from onward.config.mesh import divides_vocabulary
from onward.model.attachments import Attachment
from onward.model.attention import SelfAttentionModule
from onward.model.context import AttentionContext
from onward.model.decoder import Decoder
from onward.model.differential import DifferentialAttentionModule
from onward.model.experts import (
    ExpertsModule,
    GatedSharedExpertModule,
    InputWeightedExpertsModule,
    LatentExpertsModule,
)
from onward.model.extended import (
    ExtendedSelfAttentionModule,
    GatedLatentAttentionModule,
    KeyValueSelfAttentionModule,
    LateNormSelfAttentionModule,
    SharingSelfAttentionModule,
)
from onward.model.feedforward import CombiningFeedForwardModule, XIELUFeedForwardModule
from onward.model.indexed import IndexedLatentAttentionModule
from onward.model.latent import LatentAttentionModule
from onward.model.layers import GatedFeedForwardModule, Linear, PlainFeedForwardModule
from onward.model.mask import AttentionMask
from onward.parallel.functions import Copy, Join
from onward.parallel.masks import with_slopes
from onward.parallel.parts import piece
from onward.parallel.stream import Stream
from onward.parallel.vocabulary import Vocabulary


@dataclass(frozen=True)
class Rule:
    """How the processes of the tensor axis hold a parameter of a branch (the attention or the feed-forward of a block):
    by default each has all of it, and its gradient is summed over the processes.

    `split` is the dimension of the parameter that is divided, None for none. `inputs`: this is the input dimension of a
    layer, so that the processes' outputs must be summed. `heads` > 0: dimension 0 consists of this many heads, fewer
    than processes; each process holds all heads and uses one. `once`: only one process uses the parameter; for the
    others it is 0.
    """

    split: int | None = None
    inputs: bool = False
    heads: int = 0
    once: bool = False


REPLICATED, ONCE, OUT, IN = Rule(), Rule(once=True), Rule(split=0), Rule(split=1, inputs=True)
STACK_OUT, STACK_IN = Rule(split=1), Rule(split=2, inputs=True)
KV = "key/value heads"  # divided by rows, or one head for each process if there are fewer heads than processes

FEED_FORWARD: dict[str, Any] = {"up": OUT, "gate": OUT, "down": IN, "share": REPLICATED}
SELF_ATTENTION: dict[str, Any] = {
    "q": OUT,
    "k": KV,
    "v": KV,
    "q_norm": REPLICATED,
    "k_norm": REPLICATED,
    "v_norm": REPLICATED,
    "gate": OUT,
    "gated": OUT,
    "attend.sinks": OUT,
    "out": IN,
}
LATENT_ATTENTION: dict[str, Any] = {
    "q_down": REPLICATED,
    "q_norm": REPLICATED,
    "q": OUT,
    "kv_down": REPLICATED,
    "kv_norm": REPLICATED,
    "kv": OUT,
    "gate": OUT,
    "gated": OUT,
    "out": IN,
}
DIFFERENTIAL_ATTENTION: dict[str, Any] = {
    "q": OUT,
    "k": KV,
    "v": KV,
    **dict.fromkeys(("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "head_norm"), REPLICATED),
    "out": IN,
}
EXPERTS: dict[str, Any] = {
    "router": REPLICATED,
    "gate": STACK_OUT,
    "up": STACK_OUT,
    "down": STACK_IN,
    "gate_bias": STACK_OUT,
    "up_bias": STACK_OUT,
    "down_bias": ONCE,
    **{f"shared.{name}": rule for name, rule in FEED_FORWARD.items()},
}
TABLE: dict[type[nn.Module], dict[str, Any]] = {  # for each branch, the rules of its layers and of its own parameters
    SelfAttentionModule: SELF_ATTENTION,
    ExtendedSelfAttentionModule: SELF_ATTENTION,
    LateNormSelfAttentionModule: SELF_ATTENTION,
    KeyValueSelfAttentionModule: SELF_ATTENTION,
    SharingSelfAttentionModule: SELF_ATTENTION,
    LatentAttentionModule: LATENT_ATTENTION,
    GatedLatentAttentionModule: LATENT_ATTENTION,
    IndexedLatentAttentionModule: LATENT_ATTENTION | {"indexer": REPLICATED},
    DifferentialAttentionModule: DIFFERENTIAL_ATTENTION,
    PlainFeedForwardModule: FEED_FORWARD,
    GatedFeedForwardModule: FEED_FORWARD,
    CombiningFeedForwardModule: FEED_FORWARD,
    XIELUFeedForwardModule: FEED_FORWARD | {"act": REPLICATED},
    GatedSharedExpertModule: FEED_FORWARD,
    ExpertsModule: EXPERTS,
    InputWeightedExpertsModule: EXPERTS,
    LatentExpertsModule: EXPERTS | {"latent_in": REPLICATED, "latent_out": REPLICATED},
}


def rule_of(branch: nn.Module, name: str, n: int) -> Rule:
    """How `n` processes hold a parameter of a branch (attention or feed-forward), by its name in the branch, such as
    q.weight."""
    weight, adapter, own = name.partition("_lora.")  # adapters: name.weight_lora.adapter.a or stack_lora.adapter.a
    table, path = TABLE.get(type(branch), {}), weight.split(".")
    known = [".".join(path[:i]) for i in range(len(path), 0, -1)]
    key = next((one for one in known if one in table), None)
    if key is None:
        raise UserError(f"{type(branch).__name__}.{name} has no rule for tensor parallelism: use a mesh with tensor=1")
    rule: Any = table[key]
    if rule == KV:
        heads: Any = branch.n_kv_heads
        rule = Rule(heads=heads) if heads < n else OUT
    end = own.rpartition(".")[2]
    if end == "magnitude" and rule.inputs:
        raise UserError(f"dora of {key} has no rule for tensor parallelism: leave dora out, or use tensor=1")
    if end in ("a", "b"):  # A has the weight's input dimension, B its output dimension
        return rule if rule != REPLICATED and (end == "a") == rule.inputs else REPLICATED
    return ONCE if rule == IN and not adapter and path[-1] == "bias" else rule


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of a module as a DTensor, and the rule by which this process computes with its part of it."""

    owner: nn.Module
    name: str
    rule: Rule | None  # None outside branches
    stream: Stream | None = None  # stream that the parameter, such as a norm's weight, belongs to

    def of(self, mesh: DeviceMesh) -> Tensor:
        parameter: Any = self.owner._parameters[self.name]
        part: Tensor = parameter.to_local()
        if self.stream:
            return self.stream.weight(part)
        if self.rule is None or self.rule.split is not None:
            return part
        part = Copy.apply(part, mesh.get_group())
        rank, n = mesh.get_local_rank(), mesh.size()
        if self.rule.heads:
            return part.unflatten(0, (self.rule.heads, -1))[rank * self.rule.heads // n]
        return part * (rank == 0) if self.rule.once else part


class Locally:
    """Hooks that replace DTensor parameters by this process's parts, as plain tensors, during the forward pass of a
    module."""

    def __init__(
        self, attachment: Attachment, module: nn.Module, parameters: list[LocalParameter], mesh: DeviceMesh
    ) -> None:
        self.parameters, self.mesh = parameters, mesh
        attachment.before(module, self.begin, prepend=True)
        attachment.after(module, self.end)  # always_call=True would compile each block separately

    def begin(self, module: nn.Module, inputs: Any) -> None:
        for one in self.parameters:
            one.owner.__dict__[one.name] = one.of(self.mesh)

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for one in self.parameters:
            one.owner.__dict__.pop(one.name, None)


def divide_layers(model: Decoder, mesh: DeviceMesh) -> None:
    """Divide the attention and the feed-forward of each block of a decoder among the processes of a mesh with one axis,
    in place; parameters become DTensors. Raises a UserError for a module or a parameter that cannot be divided.

    The weights of the processes must be equal. Each process keeps its part of them, without communication.
    """
    n = mesh.size()
    if model.layer_inputs is not None:
        raise UserError("Cannot divide the heads of layers that embed the tokens themselves: use a mesh with tensor=1")
    branches = {
        name: branch
        for layer, block in enumerate(model.blocks)
        for name, branch in ((f"blocks.{layer}.{kind}", block._modules.get(kind)) for kind in ("attn", "mlp"))
        if branch is not None
    }
    rules: dict[tuple[nn.Module, str], Rule | None] = {}
    inside: set[nn.Module] = set()
    for name, branch in branches.items():
        rules |= rules_of(name, branch, n)
        inside.update(branch.modules())
    of_vocabulary = rules_of_vocabulary(model, n)
    rules |= of_vocabulary
    stream, in_stream = Stream(model, mesh), {*model.blocks.modules()} - inside
    distributed: dict[nn.Parameter, nn.Parameter] = {}  # a head may share the embedding's parameter
    for module in list(model.modules()):
        own = []
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                rule = rules.get((module, name))
                if parameter not in distributed:
                    distributed[parameter] = as_dtensor(parameter, rule, mesh)
                module._parameters[name] = distributed[parameter]
                own.append(LocalParameter(module, name, rule, stream if module in in_stream else None))
        if own and module not in inside:
            Locally(stream.attachment, module, own, mesh)
    if of_vocabulary:
        Vocabulary(model, mesh)
    for path, branch in branches.items():
        used = [
            LocalParameter(owner, name, rules[owner, name])
            for owner in branch.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        narrow(branch, rules, n)
        normalize_gathered(branch, model, int(path.split(".")[1]), mesh, stream.attachment)
        connect(branch, used, mesh, stream)


def rules_of(name: str, branch: nn.Module, n: int) -> dict[tuple[nn.Module, str], Rule | None]:
    """Return the rule of each parameter of a branch, by (module, parameter name); messages call the branch `name`."""
    if type(branch) not in TABLE or (isinstance(branch, SelfAttentionModule) and isinstance(branch.out, nn.Identity)):
        raise UserError(f"{name}, a {type(branch).__name__}, has no rule for tensor parallelism: use tensor=1")
    rules: dict[tuple[nn.Module, str], Rule | None] = {}
    for path, owner in branch.named_modules():
        if own_buffers := dict(owner.named_buffers(recurse=False)):
            kept = f"{name}.{path}.{next(iter(own_buffers))}"
            raise UserError(f"{kept}, a fixed tensor, has no rule for tensor parallelism: use tensor=1")
        for own, _ in owner.named_parameters(recurse=False):
            rules[owner, own] = rule_of(branch, f"{path}.{own}".lstrip("."), n)
    return rules


def rules_of_vocabulary(model: Decoder, n: int) -> dict[tuple[nn.Module, str], Rule | None]:
    """The rules of embedding and head, divided by rows; none if `n` does not divide the vocabulary, or if either has
    adapters."""
    modules = model.embed, model.head
    if not divides_vocabulary(model.config, n) or any(module._modules for module in modules):
        return {}
    return {(module, name): OUT for module in modules for name, _ in module.named_parameters()}


def as_dtensor(parameter: nn.Parameter, rule: Rule | None, mesh: DeviceMesh) -> nn.Parameter:
    """The parameter as a DTensor, divided by a rule (None: replicated); this process keeps its part."""
    split = None if rule is None else rule.split
    part = parameter.detach()
    if split is not None:
        part = piece(part, split, mesh.size(), mesh.get_local_rank()).contiguous()
    placement = Replicate() if split is None else Shard(split)
    shape, stride = parameter.shape, torch.empty(parameter.shape, device="meta").stride()
    full = DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(full, requires_grad=parameter.requires_grad)


def narrow(branch: nn.Module, rules: dict[tuple[nn.Module, str], Rule | None], n: int) -> None:
    """Reduce sizes that the modules of a branch store, such as the number of heads, to those of one of `n`
    processes."""
    for module in branch.modules():
        rule = rules.get((module, "weight"))
        if isinstance(module, Linear) and rule is not None:
            if rule.inputs:
                module.in_features //= n
            elif rule.split == 0:
                module.out_features //= n
            elif rule.heads:
                module.out_features //= rule.heads
    if isinstance(branch, SelfAttentionModule):
        widths = branch.n_heads * branch.d_head, branch.n_kv_heads * branch.d_head
        branch.n_heads, branch.n_kv_heads = branch.n_heads // n, max(1, branch.n_kv_heads // n)
        if (branch.q_group, branch.k_group) == widths:  # norms of the whole width
            branch.q_group, branch.k_group = branch.n_heads * branch.d_head, branch.n_kv_heads * branch.d_head
    elif isinstance(branch, LatentAttentionModule):
        branch.n_heads //= n


def normalize_gathered(branch: nn.Module, model: Decoder, layer: int, mesh: DeviceMesh, attachment: Attachment) -> None:
    """Register hooks for norms of queries and keys that need all heads, since they normalize all heads together or have
    a weight for each head: they gather the heads of all processes, and each process keeps the results of its own heads.
    `branch` is the attention of layer `layer` of `model`; nothing changes for other norms and branches."""
    part = at(model.config.attention, layer)
    if not isinstance(branch, SelfAttentionModule) or not isinstance(part, SelfAttention):
        return
    if part.qk_norm not in ("width", "heads"):
        return
    dim, n, rank = (-1 if part.qk_norm == "width" else -2), mesh.size(), mesh.get_local_rank()
    sizes = part.heads(model.config)
    for norm, heads in (branch.q_norm, sizes.n_heads), (branch.k_norm, sizes.n_kv_heads):
        copies = max(1, n // heads)  # processes with the same head

        def gather(_: nn.Module, inputs: Any, copies: int = copies) -> tuple[Tensor]:
            full: Tensor = Copy.apply(Join.apply(inputs[0], dim, mesh), mesh.get_group())
            if copies > 1:
                full = torch.cat(full.chunk(n, dim)[::copies], dim)
            return (full,)

        def own(_: nn.Module, inputs: Any, y: Tensor, copies: int = copies) -> Tensor:
            return piece(y, dim, n // copies, rank // copies)

        attachment.before(norm, gather)
        attachment.after(norm, own)


def connect(branch: nn.Module, parameters: list[LocalParameter], mesh: DeviceMesh, stream: Stream) -> None:
    """Register hooks that make a branch (attention or feed-forward) compute with this process's parts of `parameters`,
    take its input from the residual stream, and return its output, summed over the processes, to the stream."""
    masks = WeakKeyDictionary[AttentionMask, AttentionMask]()

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *contexts = inputs
        return stream.enter(x), *(own_heads(context) for context in contexts)

    def own_heads(context: AttentionContext) -> AttentionContext:
        mask = context.mask
        if mask.slopes is None:
            return context
        if mask not in masks:
            masks[mask] = with_slopes(mask, piece(mask.slopes, 0, mesh.size(), mesh.get_local_rank()))
        return replace(context, mask=masks[mask])

    Locally(stream.attachment, branch, parameters, mesh)
    stream.attachment.before(branch, enter)
    stream.attachment.after(branch, lambda _, inputs, y: stream.leave(y))
