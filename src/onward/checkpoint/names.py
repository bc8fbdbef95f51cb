"""Their tensor names and ours, by a family's table: tensors on their way from files into a model, and back."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import reduce

import torch
from torch import Tensor

from onward.checkpoint.weights import ALIGNED, AT_ONCE, FLOATS, Stored
from onward.errors import UserError
from onward.families import Family
from onward.model.config import DecoderConfig

Change = Callable[[Tensor], Tensor]
same: Change = lambda t: t


def rows(
    family: Family, config: DecoderConfig, ours: Mapping[str, Tensor]
) -> Iterator[tuple[str | list[str], list[str], Change, Change]]:
    """The family's table for the tensors a model has: (their names, our names, into ours, back to theirs).

    A tensor of ours without a row keeps its name.
    """
    named = set()
    for their, our, *fix in family.names(config):
        into, back = fix[0] if fix else (same, same)
        our_names = our if isinstance(our, list) else [our]
        if our_names[0] in ours:
            named.update(our_names)
            yield their, our_names, into, back
    for name in ours:
        if name not in named:
            yield name, [name], same, same


def to_theirs(family: Family, config: DecoderConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors under their names from tensors under ours, one by one; on the meta device, their shapes."""
    for their, names, _, back in rows(family, config, ours):
        tensor = back(joined([ours[name] for name in names]))
        yield from zip(their, tensor.unbind()) if isinstance(their, list) else [(their, tensor)]


def joined(tensors: list[Tensor]) -> Tensor:
    """Tensors one after another along their rows."""
    if tensors[0].is_meta:  # where torch.cat takes a second of imports
        return tensors[0].new_empty(sum(tensor.size(0) for tensor in tensors), *tensors[0].shape[1:])
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def to_ours(
    family: Family,
    config: DecoderConfig,
    stored: Mapping[str, Stored],
    model: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    allow_nonfinite: bool,
) -> dict[str, Tensor]:
    """Tensors under our names, contiguous (fused optimizers ask so), from stored ones under theirs.

    `model` has the tensors that are expected, on the meta device. What needs no change, and lies where torch would put
    it, stays mapped into memory; the rest is copied piece by piece into the tensor that it becomes. A UserError names a
    tensor that is missing, left over, of the wrong shape or type, or not finite.
    """
    wanted = dict(to_theirs(family, config, model))
    theirs = find(family, config, wanted, stored)
    found: dict[str, Tensor] = {}
    spare = Spare()
    for their, names, into, _ in rows(family, config, model):
        stacked = isinstance(their, list)
        pieces = their if isinstance(their, list) else [their]
        stays = not stacked and into is same and device.type == "cpu"
        whole = mapped(theirs[pieces[0]], dtype) if stays else None
        if whole is None:
            make = torch.empty if into is same else spare.empty
            stack = copied({name: theirs[name] for name in pieces}, make, dtype, device, allow_nonfinite)
            whole = into(stack if stacked else stack[0])
        else:
            check(whole, pieces[0], allow_nonfinite)
        for name, part in zip(names, whole.split([model[name].size(0) for name in names])):
            found[name] = part if into is same and aligned(part) else part.clone(memory_format=torch.contiguous_format)
    return found


class Spare:
    """Memory for tensors that are copied on, used again and again: given back each time, much of it would be lost
    between the tensors that are kept."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if self.bytes.numel() < size:
            self.bytes = torch.empty(0)
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        return self.bytes[:size].view(dtype).view(shape)


def mapped(source: Stored, dtype: torch.dtype | None) -> Tensor | None:
    """A tensor that stays in its file, if it is there as it shall be."""
    if source.mapped is None or dtype not in (None, FLOATS[source.dtype]):
        return None
    tensor = source.mapped()
    return tensor if aligned(tensor) else None


def copied(
    sources: Mapping[str, Stored],
    make: Callable[..., Tensor],
    dtype: torch.dtype | None,
    device: torch.device,
    allow_nonfinite: bool,
) -> Tensor:
    """The stack of one or more tensors of the same shape in memory from `make`, a part of a tensor at a time."""
    dtype = dtype or reduce(torch.promote_types, (FLOATS[source.dtype] for source in sources.values()))
    stack = make(len(sources), *next(iter(sources.values())).shape, dtype=dtype, device=device)
    for (name, source), tensor in zip(sources.items(), stack):
        step = max(1, AT_ONCE // tensor[0].nbytes)
        for start, part in zip(range(0, len(tensor), step), tensor.split(step)):
            part.copy_(source.rows(start, start + len(part)))
            check(part, name, allow_nonfinite)
    return stack


def find(
    family: Family, config: DecoderConfig, wanted: Mapping[str, Tensor], stored: Mapping[str, Stored]
) -> dict[str, Stored]:
    """The stored tensors by the names wanted, with or without the family's base prefix."""
    left, found = dict(stored), {}
    for name, shape in ((name, list(tensor.shape)) for name, tensor in wanted.items()):
        short = name if name in left else name.removeprefix(family.BASE)
        if short not in left:
            raise UserError(f"the checkpoint has no tensor {name}, which its config.json asks for")
        tensor = found[name] = left.pop(short)
        if tensor.shape != shape:
            raise UserError(f"tensor {short} has shape {tensor.shape}, and config.json asks for {shape}")
        if tensor.dtype not in FLOATS:
            raise UserError(f"tensor {short} holds {tensor.dtype}: Onward reads weights as {', '.join(FLOATS)}")
    if config.tied:  # some files repeat the embedding as the head
        for their, *_ in rows(family, config, {"head.weight": torch.empty(0)}):
            left.pop(str(their), None)
    ignored = "|".join(filter(None, (family.IGNORED, r"rotary_emb\.inv_freq$")))
    if extra := [name for name in left if not re.search(ignored, name)]:
        raise UserError(f"the checkpoint has a tensor {min(extra)} that its config.json has no place for")
    return found


def aligned(tensor: Tensor) -> bool:
    """Whether a tensor lies as torch would have made it."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0


def check(tensor: Tensor, name: str, allow_nonfinite: bool) -> None:
    """A UserError if a number is not finite and that is not allowed; takes no memory."""
    if not allow_nonfinite and not all(bound.isfinite() for bound in tensor.aminmax()):
        raise UserError(
            f"tensor {name} holds NaN or infinite numbers (as {tensor.dtype}): get the weights again, or load them "
            "all the same with --allow-nonfinite (allow_nonfinite=True)"
        )
