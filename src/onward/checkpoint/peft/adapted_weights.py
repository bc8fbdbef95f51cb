"""Translates adapters between PEFT's weights and Decoder's: a weight in the family's files may join several weights of
Decoder ("ours"), such as a fused projection.

PEFT adapts layers, by `target_modules`, and parameters of other modules, by `target_parameters`: transformers 5 keeps
the experts of a layer in two stacks, `gate_up_proj` and `down_proj`. If two parameters of a module are adapted, the
tensors of the first are named after the module and `.base_layer`. The tensors of a stack are lora_A (X R, I), expert by
expert, and lora_B (O, R X), in which neighboring columns are those of different experts.

Shapes: X experts, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onward.checkpoint.peft.config import CHANGED_BASE, LoraConfig, matches
from onward.families import Family
from onward.families._experts import FUSED, LLAMA, stack_module
from onward.model.adapters import Adapter
from onward.model.decoder import Decoder
from onward.transforms.factors import orthonormal, principal
from onward.transforms.lora import Target
from onward.transforms.quantize import QuantizedLinear

LAYER = "lora_A.weight", "lora_B.weight"
EMBEDDING = "lora_embedding_A", "lora_embedding_B"
MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight in the family's files that can have an adapter, and the weights of Decoder that it joins along its rows.
    With `stack` it is the stack of matrices (X, O, I) of all experts."""

    module: str  # name of the module that holds the adapter's tensors
    key: str  # in adapter_config.json: the module, or the module and the name of its parameter
    ours: Sequence[str]  # names of our weights, joined along rows in this weight
    order: Tensor  # for each row of this weight, its row in Onward's weight
    stack: bool = False
    expert: int | None = None  # index of one matrix in our stacks, for adapters from before transformers 5
    transposed: bool = False  # whether the family's weight is (I, O)


def adapted_weights(kind: Family, model: Decoder, targets: Mapping[str, Target]) -> Iterator[AdaptedWeight]:
    """The weights in the family's files that hold the adaptable weights of a model; parameters of one module keep their
    order."""
    known = {name if target.weight.ndim == 3 else f"{name}.weight": name for name, target in targets.items()}
    named, table = set(), list(kind.names(model.config))
    mixtures = any(isinstance(their, list) for their, *_ in table)
    for their, our, *fix in table:
        given = [our] if isinstance(our, str) else our
        if not all(name in known for name in given):
            continue
        ours = [known[name] for name in given]
        named.update(ours)
        rows = torch.arange(sum(targets[name].weight.size(-2) for name in ours))
        stack = targets[ours[0]].weight.ndim == 3
        if isinstance(their, str):
            column = rows.view((len(ours), -1, 1) if stack else (-1, 1))
            theirs = fix[0][1](column) if fix else column
            order = theirs.flatten()
            module, _, leaf = their.removesuffix(".weight").rpartition(".")
            if stack:
                yield AdaptedWeight(module, their, ours, order, stack=True)
            else:  # PEFT treats a layer of this name as one of the experts' matrices, unless it is named as a parameter
                layer = their.removesuffix(".weight")
                key, transposed = their if mixtures and leaf in LLAMA else layer, theirs.size(-1) > 1
                yield AdaptedWeight(layer, key, ours, order, transposed=transposed)
        else:
            for expert, matrix in enumerate(their):
                matrix = matrix.removesuffix(".weight")
                yield AdaptedWeight(matrix, matrix, ours, rows, expert=expert)
            experts, _, projection = ours[0].rpartition(".")
            if projection in FUSED:
                module, (leaf, *parts) = stack_module(their), FUSED[projection]
                ours = [f"{experts}.{part}" for part in parts]
                rows = torch.arange(sum(targets[name].weight.size(-2) for name in ours))
                yield AdaptedWeight(module, f"{module}.{leaf}", ours, rows, stack=True)
    for name, target in targets.items():
        if name not in named and name != "head":
            stack = target.weight.ndim == 3
            module = name.rpartition(".")[0] if stack else name
            yield AdaptedWeight(module, name, [name], torch.arange(target.weight.size(-2)), stack)


def tensor_names(chosen: Sequence[AdaptedWeight]) -> dict[str, AdaptedWeight]:
    """Weights by the module names of their tensors in PEFT's file: PEFT wraps adapted parameters of a module around
    each other, so each wrapping adds `.base_layer`."""
    adapted, around = dict[str, AdaptedWeight](), Counter[str]()
    for stored in reversed(chosen):
        adapted[stored.module + ".base_layer" * around[stored.module]] = stored
        around[stored.module] += 1
    return adapted


@dataclass(frozen=True)
class Joined:
    """The adapter of a weight in the family's files, joined from the adapters of Decoder's weights."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    rank: int
    alpha: float


def joined(
    stored: AdaptedWeight,
    adapters: Mapping[str, Adapter],
    targets: Mapping[str, Target],
    gather: Callable[[Tensor], Tensor],
) -> Joined:
    """Join the adapters of Decoder's weights. If they have different A, the ranks add up: the new A stacks them, and B
    is block-diagonal."""
    factors = {our: adapters[our].factors() for our in stored.ours if our in adapters}
    present = [adapters[our] for our in factors]
    every = [a.detach() for a, _ in factors.values()]
    scaling, shared = present[0].scaling, all(torch.equal(a, every[0]) for a in every)
    a = every[0] if shared else torch.cat(every, -2)
    rank, rows, magnitudes, start = a.size(-2), [], [], 0
    for our in stored.ours:
        b = a.new_zeros(*targets[our].weight.shape[:-1], rank)
        if our in adapters:
            own = factors[our][1].detach()
            columns = slice(0, rank) if shared else slice(start, start := start + own.size(-1))
            b[..., columns] = own * (adapters[our].scaling / scaling)
        rows.append(b)
        if present[0].magnitude is not None:
            known = adapters[our].magnitude if our in adapters else None
            magnitudes.append(gather(targets[our].weight).to(a.dtype).norm(dim=1) if known is None else known)
    magnitude = torch.cat([m.detach() for m in magnitudes])[stored.order] if magnitudes else None
    b = torch.cat(rows, -2)[..., stored.order, :]
    if stored.stack:
        a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
    return Joined(a, b, magnitude, rank, scaling * (math.sqrt(rank) if present[0].rslora else rank))


def split(
    stored: AdaptedWeight,
    given: Mapping[str, Tensor],
    config: LoraConfig,
    targets: Mapping[str, Target],
    subtracted: bool,
) -> list[Adapter]:
    """Split a PEFT adapter into one for each of the weights of Decoder that it joins. With `subtracted`, the second
    half of the rank subtracts the initial values of A and B, as for PiSSA; the adapter of a single weight keeps these
    separately. Raises a ValueError for a tensor that does not fit."""
    first = targets[stored.ours[0]]
    leaves = EMBEDDING if isinstance(first.module, nn.Embedding) else LAYER
    a, b = (given[leaf.removesuffix(".weight")] for leaf in leaves)
    if stored.stack:
        a, b = a.unflatten(0, (len(first.weight), -1)), b.unflatten(1, (-1, len(first.weight))).permute(2, 0, 1)
    magnitude, rank = given.get(MAGNITUDE), a.size(-2)
    own = stored.key if stored.stack else f"{stored.module}.weight"  # its name if it is targeted as a parameter
    name = own if any(matches(pattern, own) for pattern in config.target_parameters or ()) else stored.module
    if rank != config.rank_of(name):
        raise ValueError(f"its rank is {rank}, but {config.rank_of(name)} in adapter_config.json")
    if config.use_dora != (magnitude is not None):
        raise ValueError(
            f"use_dora is {config.use_dora}, but magnitudes are {'present' if magnitude is not None else 'missing'}"
        )
    scaling = config.alpha_of(name) / (math.sqrt(rank) if config.use_rslora else rank)
    kind: dict[str, Any] = {"dropout": config.lora_dropout, "rslora": config.use_rslora}
    back = stored.order.argsort()
    first_values: tuple[Tensor, Tensor] | None = None
    if config.init_lora_weights in CHANGED_BASE and leaves is LAYER:
        start_a, start_b = initial_factors(stored, targets, str(config.init_lora_weights), rank, scaling)
        first_values = start_a, start_b[back]
    elif subtracted and leaves is LAYER and len(stored.ours) == 1 and not rank % 2:
        rank //= 2
        first_values = a[..., rank:, :], -b[..., back, rank:]
        a, b = a[..., :rank, :], b[..., :rank]
    b, magnitude = b[..., back, :], None if magnitude is None else magnitude[back]
    parts, start = [], 0
    for our in stored.ours:
        target = targets[our]
        weight = target.weight if magnitude is None else target.values  # for the norms
        weight = weight if stored.expert is None else weight[0]
        end = start + weight.size(-2)
        adapter = Adapter(weight, rank, scaling, dora=magnitude is not None, **kind)
        if first_values:
            adapter.begin(first_values[0], first_values[1][..., start:end, :])
        pairs = [(adapter.a, a), (adapter.b, b[..., start:end, :])]
        if adapter.magnitude is not None and magnitude is not None:
            pairs.append((adapter.magnitude, magnitude[start:end]))
        for parameter, tensor in pairs:
            if parameter.shape != tensor.shape:
                raise ValueError(f"its shape is {tuple(tensor.shape)}, but the model asks for {tuple(parameter.shape)}")
            parameter.data.copy_(tensor)
        parts.append(adapter)
        start = end
    return parts


def initial_factors(
    stored: AdaptedWeight, targets: Mapping[str, Target], kind: str, rank: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """A (R, I) and B (O, R) with which PEFT initialized an adapter, in the row order of the family's files: PEFT
    subtracts scaling B A from the base. Raises a ValueError if they are unknown."""
    modules = [targets[our].module for our in stored.ours]
    if stored.stack or stored.expert is not None or any(isinstance(module, QuantizedLinear) for module in modules):
        raise ValueError(f"init_lora_weights is {kind}, which is for layers with plain weights: merge it in PEFT")
    if stored.ours[0] == "head" and targets["head"].module.weight is targets["embed"].module.weight:
        raise ValueError(f"init_lora_weights is {kind}, which changed the embedding too, as the head shares its weight")
    weight = torch.cat([targets[our].values.detach() for our in stored.ours])[stored.order]
    if kind == "olora" and stored.transposed:
        raise ValueError(f"init_lora_weights is {kind}, of the transposed weight in this family: merge it in PEFT")
    return principal(weight, rank, scaling) if kind == "pissa" else orthonormal(weight, rank)


def stacked(weight: Tensor, by_expert: Mapping[int, Adapter]) -> Adapter:
    """The adapter of a stack of experts' matrices (X, O, I), from those of single matrices; experts without an adapter
    get zeros."""
    first = next(iter(by_expert.values()))
    if any((a.a.shape, a.scaling) != (first.a.shape, first.scaling) for a in by_expert.values()):
        raise ValueError("their ranks or scalings differ, but those of a stack must be equal")
    if first.magnitude is not None:
        raise ValueError("they are DoRA, which stacks do not support")
    kind = {"dropout": first.dropout.p, "rslora": first.rslora}
    adapter = Adapter(weight, first.a.size(0), first.scaling, dora=False, **kind)  # type: ignore[arg-type]
    for expert, own in by_expert.items():
        adapter.a.data[expert], adapter.b.data[expert] = own.a.data, own.b.data
    return adapter
