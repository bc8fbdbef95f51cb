"""LoRA, rsLoRA and DoRA for named weights of a trained model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.config.lora import EVA, LoRA
from onward.model.adapters import (
    Adapter,
    TokenRows,
    WeightAdapters,
    adapter_names,
    check_adapter,
    each_adapter,
    selection,
)
from onward.model.attachments import attach, attached, detach
from onward.model.decoder import Decoder
from onward.model.deferred import defer, read_of, values
from onward.model.experts import ExpertsModule
from onward.model.layers import Linear
from onward.transforms.factors import check_rank, parts_of
from onward.transforms.quantize import QuantizedLinear, check_stored


class Target(NamedTuple):
    """A weight that can have LoRA adapters, as a module and the name of its parameter."""

    module: nn.Module
    parameter: str

    @property
    def weight(self) -> Tensor:
        """The weight (O, I), or a stack (X, O, I) of the weights of experts; for an embedding (V, D), the transposed
        weight."""
        weight: Tensor = getattr(self.module, self.parameter)
        return weight.mT if isinstance(self.module, nn.Embedding) else weight

    @property
    def values(self) -> Tensor:
        weight = values(getattr(self.module, self.parameter))
        return weight.mT if isinstance(self.module, nn.Embedding) else weight

    @property
    def adapters(self) -> WeightAdapters | None:
        adapters = self.module._modules.get(f"{self.parameter}_lora")
        return adapters if isinstance(adapters, WeightAdapters) else None


def weights(model: nn.Module) -> dict[str, Target]:
    """All weights that can have adapters, by name: linear layers, embeddings and stacks of experts."""
    targets = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear | QuantizedLinear | nn.Embedding):
            targets[name] = Target(module, "weight")
        elif isinstance(module, ExpertsModule):
            targets |= {f"{name}.{stack}": Target(module, stack) for stack in (*module.inner, "down")}
    return targets


def matching(names: Sequence[str], target: str, what: str) -> list[str]:
    """The dotted names that contain `target`, such as "attn.q"; raises a UserError, in which `what` names the option,
    if there are none."""
    matches = [name for name in names if f".{target}." in f".{name}."]
    if not matches:
        pieces = [[piece for piece in name.split(".") if not piece.isdigit()] for name in names]
        known = {".".join(some) for one in pieces for some in (one[-2:], one[-1:], one[:1]) if some}
        raise UserError(f"{what} {target!r} matches nothing in this model: {nearest(target, known)}")
    return matches


@checked
def add_lora(model: Decoder, lora: LoRA, name: str = "default") -> None:
    """Add LoRA adapters called `name` to a model, in place, and use them. All other parameters are frozen, except those
    that `lora.full`, `lora.tokens` and `lora.bias` select.

    New adapters change nothing: B (of an embedding, A) is 0, or the initial value of B A is subtracted from the weight.
    Raises a UserError for a target that does not exist.
    """
    if isinstance(lora.init, EVA):
        raise UserError("eva needs the inputs of layers on the data of a run: train with onward finetune --lora")
    add_adapters(model, lora, name)
    initialize(model, lora, name)


def add_adapters(model: Decoder, lora: LoRA, name: str = "default") -> None:
    """Add adapters as `add_lora` does, but with B A = 0 for every `lora.init`: values are loaded or computed later."""
    targets = weights(model)
    chosen = dict.fromkeys(one for target in lora.targets for one in matching(list(targets), target, "target"))
    ranks = dict.fromkeys(chosen, lora.rank)
    for target, rank in lora.ranks.items():
        ranks |= dict.fromkeys(matching(list(chosen), target, "ranks"), rank)
    if not any(ranks.values()):
        raise UserError("Cannot add adapters, because ranks is 0 for all targets: give a target a positive rank")
    full = fully_trained(model, lora)
    check_tokens(model, lora, {*chosen, *full})
    for one, rank in ranks.items():
        if lora.dora and targets[one].weight.ndim > 2:
            raise UserError(f"dora does not support stacks of experts such as {one}: leave out dora or this target")
        check_rank(lora.init, rank, targets[one].weight, one)
    changed = [targets[one] for one, rank in ranks.items() if rank]
    for each in [*changed, Target(model.embed, "weight")] if lora.tokens else changed:
        check_free(each, name)
    model.requires_grad_(False)
    kind: dict[str, Any] = {"dropout": lora.dropout, "rslora": lora.rslora, "dora": lora.dora}
    for one, rank in ranks.items():
        if rank:
            weight = targets[one].values if lora.dora else targets[one].weight
            add_adapter(model, targets[one], name, Adapter(weight, rank, lora.scaling_of(rank), **kind))
    for one in full:
        train_fully(model, one)
    if lora.tokens:
        embedding = values(model.embed.weight)
        ids = torch.tensor(sorted({*lora.tokens}), device=embedding.device)
        add_token_rows(model, name, ids, embedding[ids])
    biases = [f"{one}.bias" for one in chosen] if lora.bias == "lora_only" else []
    for one, parameter in model.named_parameters():
        if one in biases or (lora.bias == "all" and one.endswith(".bias")):
            parameter.requires_grad_(True)
    selection(model).name = name


def fully_trained(model: Decoder, lora: LoRA) -> list[str]:
    modules = [one for one, module in model.named_modules() if one and list(module.parameters())]
    return [one for target in lora.full for one in matching(modules, target, "full")]


def check_tokens(model: Decoder, lora: LoRA, trained: Set[str]) -> None:
    """Raise a UserError for tokens outside the vocabulary, and for tokens whose embeddings are trained anyway because
    `trained` contains the embedding, or the head that is tied to it."""
    size, tied = model.config.vocab_size, ("embed", "head") if model.config.tied else ("embed",)
    if lora.tokens and max(lora.tokens) >= size:
        raise UserError(f"Cannot train token {max(lora.tokens)}, because the vocabulary has {size:,}: give smaller ids")
    if lora.tokens and (both := trained & {*tied}):
        raise UserError(f"Cannot train single tokens, because {min(both)} is trained as a whole: leave out one of them")


def add_token_rows(model: Decoder, name: str, ids: Tensor, rows: Tensor) -> None:
    """Add trainable embeddings `rows` (N, D) of the tokens `ids` (N,), in ascending order."""
    exact = torch.promote_types(rows.dtype, torch.float32)
    parameter = nn.Parameter(rows.detach().to(exact, copy=True))
    for module in (model.embed, model.head) if model.config.tied else (model.embed,):
        add_adapter(model, Target(module, "weight"), name, TokenRows(ids, parameter))


@torch.no_grad()
def initialize(model: Decoder, lora: LoRA, name: str = "default") -> None:
    """Initialize new adapters from the model's weights by `lora.init`, such as PiSSA; except adapters of embeddings."""
    if lora.init is None:
        return
    for _, target, adapter in adapters_of(model, name):
        if target.adapters is not None and not isinstance(target.module, nn.Embedding):
            weight = target.adapters.weight(target.values)
            adapter.begin(*parts_of(weight, lora.init, adapter.a.size(-2), adapter.scaling))


def untrained(model: Decoder, name: str = "default") -> bool:
    layers = (adapter for _, target, adapter in adapters_of(model, name) if not isinstance(target.module, nn.Embedding))
    return not any(adapter.b.any() for adapter in layers)


def train_fully(model: Decoder, name: str) -> None:
    """Make a module trainable, in addition to the adapters; a head tied to the embedding gets its own weight."""
    if model.config.tied and name in ("embed", "head"):
        untie(model)
    model.get_submodule(name).requires_grad_(True)


def untie(model: Decoder) -> None:
    model.config = replace(model.config, tied=False)
    shared = model.embed.weight
    model.head.weight = nn.Parameter(shared.detach().clone(), requires_grad=False)
    if read := read_of(shared):
        defer(model.head.weight, read)


def resize_vocabulary(model: Decoder, size: int) -> None:
    """Give a model an untied embedding and head for `size` tokens, with uninitialized values."""
    model.config = replace(model.config, tied=False, vocab_size=size)
    for module in (model.embed, model.head):
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.new_empty(size, *parameter.shape[1:]), requires_grad=False))
    model.embed.num_embeddings = model.head.out_features = size


def check_free(target: Target, name: str) -> None:
    """Raise a UserError if `name` cannot name a new adapter of the target."""
    if not name:
        raise UserError("the name of an adapter is empty, which means no adapter: give another name")
    if target.adapters is not None and name in target.adapters:
        raise UserError(f"the model already has an adapter {name!r}: choose another name")


def add_adapter(model: Decoder, target: Target, name: str, adapter: Adapter | TokenRows) -> None:
    check_free(target, name)
    adapters = target.adapters
    known = "".join(one.description for one in attached(model) if one.kind == "adapters").split(", ")
    attachment = attach(model, "adapters", ", ".join(dict.fromkeys([*filter(None, known), name])))
    if adapters is None:
        adapters = WeightAdapters(selection(model))
        if not any(known):  # embed_scale is called with the vectors of all tokens, and never has an adapter
            attachment.before(model.embed_scale, adapters.selection.check_rows, prepend=True)
        if isinstance(target.module, ExpertsModule):
            if not any(isinstance(child, WeightAdapters) for child in target.module.children()):
                attachment.after(target.module, each_adapter, prepend=True)
        else:
            attachment.after(target.module, adapters.hook, prepend=True)
        target.module.add_module(f"{target.parameter}_lora", adapters)
    adapter.train(model.training)
    if isinstance(adapter, Adapter) and isinstance(target.module, nn.Embedding) and adapter.b.count_nonzero() == 0:
        adapter.a.data, adapter.b.data = torch.zeros_like(adapter.a), torch.randn_like(adapter.b)
    adapters[name] = adapter


def adapters_of(model: nn.Module, name: str) -> Iterator[tuple[str, Target, Adapter]]:
    """Yield (name of the weight, Target, adapter) for each weight with an adapter of this name."""
    for weight, target in weights(model).items():
        adapters = target.adapters
        if adapters is not None and name in adapters and isinstance(adapter := adapters[name], Adapter):
            yield weight, target, adapter


def token_rows(model: Decoder, name: str) -> TokenRows | None:
    """The trained token embeddings of an adapter and of the adapters below it, merged; None if there are none."""
    adapters = Target(model.embed, "weight").adapters
    known = [adapters[one] for one in selection(model).chain(name) if adapters is not None and one in adapters]
    rows = [one for one in known if isinstance(one, TokenRows)]
    if len(rows) < 2:
        return rows[0] if rows else None
    by_token = {int(token): row for one in rows for token, row in zip(one.ids, one.rows.detach())}
    ids = sorted(by_token)
    return TokenRows(rows[0].ids.new_tensor(ids), nn.Parameter(torch.stack([by_token[token] for token in ids])))


def raised(model: nn.Module) -> list[str]:
    """The trained parameters with a raised learning rate in LoRA+ (Hayou et al. 2024): vectors, and all B except those
    of embeddings."""
    embeddings = {name for name, target in weights(model).items() if isinstance(target.module, nn.Embedding)}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    of_b = lambda name: (
        "_lora." in name and name.endswith(".b") and name.partition(".weight_lora.")[0] not in embeddings
    )
    return [name for name, parameter in trained if of_b(name) or parameter.ndim == 1]


@checked
def use_adapter(model: Decoder, name: str | Sequence[str]) -> AbstractContextManager[None]:
    """Return a context manager that makes a model use the LoRA adapter `name` ("": none) or, for a sequence of names,
    one adapter for each row of the batch, in the calls of the current thread or asyncio task.

    Raises a UserError for an adapter that the model does not have, and for an empty sequence. A call of the model with
    another number of rows than names raises one.
    """
    if not isinstance(name, str) and not name:
        raise UserError("Cannot use an empty list of adapters: name the adapter of each row")
    known = adapter_names(model)
    for one in {name} if isinstance(name, str) else set(name):
        check_adapter(one, known)
    return selection(model).use(name) if known else nullcontext()


@torch.no_grad()
def joined_adapters(model: Decoder, name: str) -> dict[str, Adapter]:
    """The adapters of this name for saving, by weight, each combined with the adapter below it, if any, into one
    adapter whose rank is the sum."""
    joined = {weight: adapter for weight, _, adapter in adapters_of(model, name)}
    for weight, target, lower in adapters_of(model, selection(model).below.get(name, "")):
        parts = [lower, *([joined[weight]] if weight in joined else [])]
        factors = [part.factors() for part in parts]
        a = torch.cat([a for a, _ in factors], -2)
        one = Adapter(target.weight, a.size(-2), 1.0, dropout=parts[-1].dropout.p, dora=False)
        one.a.copy_(a)
        one.b.copy_(torch.cat([part.scaling * b for part, (_, b) in zip(parts, factors)], -1))
        joined[weight] = one
    return joined


def on_top(model: Decoder, lora: LoRA, lower: str, name: str = "default") -> None:
    """Add adapters on top of the frozen adapters called `lower`, which stay active."""
    if lora.dora or any(adapter.magnitude is not None for _, _, adapter in adapters_of(model, lower)):
        raise UserError(
            "dora does not support adapters on a frozen adapter: merge the first adapter, or leave dora out"
        )
    add_adapters(model, lora, name)
    selection(model).below[name] = lower


@checked
def remove_lora(model: Decoder, name: str = "default") -> None:
    """Remove all LoRA adapters called `name` from a model; the base model is unchanged."""
    remove_adapters(model, weights(model).values(), name)
    chosen = selection(model)  # selection() makes a new one if these adapters were the last
    chosen.name = "" if chosen.name == name else chosen.name


def remove_adapters(model: Decoder, targets: Iterable[Target], name: str) -> None:
    """Remove the adapters called `name` from the targets that have them."""
    having = [target for target in targets if target.adapters is not None and name in target.adapters]
    if not having:
        return
    attachment = attach(model, "adapters", "")
    for target in having:
        module, adapters = target.module, target.adapters
        assert adapters is not None
        del adapters[name]
        if not adapters:
            delattr(module, f"{target.parameter}_lora")
        if not any(isinstance(child, WeightAdapters) for child in module.children()):
            attachment.release(module)
    attachment.description = ", ".join(adapter_names(model))
    if not attachment.description:
        detach(model, "adapters")


@checked
@torch.no_grad()
def merge_lora(model: Decoder, name: str = "default") -> None:
    """Add the changes of the LoRA adapters called `name` to the weights of a model, in place, and remove the adapters.

    The sum is computed in at least fp32 and rounded once. A head tied to the embedding gets its own weight if either
    has an adapter. Raises a UserError for adapters of quantized weights, which cannot represent the sum, and of pruned
    or parametrized weights.
    """
    adapters = list(adapters_of(model, name))
    check_adapter(name, adapter_names(model))
    if any(isinstance(target.module, QuantizedLinear) for _, target, _ in adapters):
        raise UserError(
            "Cannot merge adapters into quantized weights: load the model without quantize, "
            "or train them on the original model, if the model was stored quantized"
        )
    for weight, target, _ in adapters:
        check_stored(target.module, target.parameter, weight)
    for weight, target, adapter in adapters:
        merged = adapter.merged(target.weight)
        if weight in ("embed", "head") and model.config.tied:
            untie(model)
        parameter = getattr(target.module, target.parameter)
        merged = merged.mT.contiguous() if isinstance(target.module, nn.Embedding) else merged
        setattr(target.module, target.parameter, nn.Parameter(merged, requires_grad=parameter.requires_grad))
    if (rows := token_rows(model, name)) is not None:
        model.embed.weight.copy_(rows.merged(model.embed.weight))
    remove_lora(model, name)
