"""Translates tensors between the names in a family's files ("theirs") and the names of Decoder's parameters ("ours"),
by the family's table of names, in both directions."""

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.packed import Change, moves_rows, packed_tensors
from onward.checkpoint.weights import ALIGNMENT, COPY_BYTES, FLOATS, StoredTensor
from onward.config.decoder import DecoderConfig
from onward.families import Names
from onward.families._needed import prediction_layers
from onward.transforms.quantize import Precision, QuantizedLinear, pack, quantize_rows, quantize_weight

same: Change = lambda t: t


def rows(
    family: Names, config: DecoderConfig, ours: Mapping[str, Any]
) -> Iterator[tuple[str | list[str], list[str], Change, Change]]:
    """Yield a row for each tensor: (name or names in the files, Decoder's names, change to Decoder's tensor, change
    back). A tensor that is not in the family's table keeps its name."""
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


def to_theirs(
    family: Names, config: DecoderConfig, ours: Mapping[str, Tensor | QuantizedLinear]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) as a family's files store them, one by one. A quantized layer, given in place of its weight,
    is packed. On the meta device the tensors have shapes only."""
    for their, names, _, back in rows(family, config, ours):
        parts = [ours[name] for name in names]
        if quantized := [part for part in parts if isinstance(part, QuantizedLinear)]:
            yield from packed_tensors(str(their), quantized, back)
            continue
        tensor = back(joined([part for part in parts if isinstance(part, Tensor)]))
        yield from zip(their, tensor.unbind()) if isinstance(their, list) else [(their, tensor)]


def joined(tensors: list[Tensor]) -> Tensor:
    if tensors[0].is_meta:  # torch.cat on meta tensors takes a second of imports
        return tensors[0].new_empty(sum(tensor.size(0) for tensor in tensors), *tensors[0].shape[1:])
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def to_ours(
    family: Names,
    config: DecoderConfig,
    stored: Mapping[str, StoredTensor],
    model: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    allow_nonfinite: bool = False,
    precisions: Mapping[str, Precision] = {},
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Read stored tensors as Decoder's parameters, contiguous as fused optimizers need them; also the integer codes and
    scales of the weights that `precisions` names or that are stored quantized.

    `model` has the expected tensors on the meta device. On a CPU, a tensor stays memory-mapped if it needs no change
    and has torch's alignment; others are copied in pieces. Without a `dtype`, trainable tensors get the dtype of the
    files (see `common_dtype`), and other tensors, which are routing biases, keep their own."""
    wanted = dict(to_theirs(family, config, model))
    theirs = find(family, config, wanted, getattr(family, "published", lambda _, as_is: as_is)(config, stored))
    table = [
        (their if isinstance(their, list) else [their], isinstance(their, list), names, into)
        for their, names, into, _ in rows(family, config, model)
    ]
    trained = {
        piece: theirs[piece] for pieces, _, names, _ in table if model[names[0]].requires_grad for piece in pieces
    }
    common = dtype or common_dtype({name: t for name, t in trained.items() if not t.quantized} or trained)
    parameters: dict[str, Tensor] = {}
    quantized: dict[str, tuple[Tensor, Tensor]] = {}
    buffer = ScratchBuffer()
    for pieces, stacked, names, into in table:
        source, sizes = theirs[pieces[0]], [model[name].size(0) for name in names]
        kept = common if dtype or model[names[0]].requires_grad else FLOATS[source.dtype]
        make = torch.empty if into is same else buffer.empty
        copy = partial(copied, {name: theirs[name] for name in pieces}, make, kept, device, allow_nonfinite)
        read: Callable[[int, int], tuple[Tensor, Tensor]]
        if not stacked and source.quantized and moves_rows(into, source.shape[0]):
            read = stored_codes(source.quantized, into, source.shape[0], device)
        elif names[0] in precisions:
            # if possible a few rows at a time, so that memory does not hold a whole plain weight
            if into is same:
                plain = partial(checked_rows, source, kept, device, pieces[0], allow_nonfinite)
            else:
                plain = partial(rows_of, into(copy()[0]))
            read = lambda *span, plain=plain, kind=precisions[names[0]]: quantize_weight(plain(*span), kind)
        else:
            stays = not stacked and into is same and device.type == "cpu"
            tensor = mapped(source, kept) if stays else None
            if tensor is None:
                stack = copy()
                tensor = into(stack if stacked else stack[0])
            else:
                check(tensor, pieces[0], allow_nonfinite)
            for name, part in zip(names, tensor.split(sizes)):
                own = aligned(part) and not buffer.holds(part)
                parameters[name] = part if own else part.clone(memory_format=torch.contiguous_format)
            continue
        for name, end in zip(names, accumulate(sizes)):
            quantized[name] = quantize_rows(read, end - model[name].size(0), end, model[name].size(1))
    return parameters, quantized


def stored_codes(
    stored: Callable[[int, int], tuple[Tensor, Tensor]], into: Change, outputs: int, device: torch.device
) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """A function that reads codes and scales of rows [start, end) of a weight that is stored quantized. `into` puts all
    rows into Decoder's order."""
    moved = None if into is same else [into(tensor) for tensor in stored(0, outputs)]

    def read(start: int, end: int) -> tuple[Tensor, Tensor]:
        integers, scales = stored(start, end) if moved is None else (tensor[start:end] for tensor in moved)
        return pack(integers, "int8" if scales.ndim == 1 else "int4").to(device), scales.to(device)

    return read


def checked_rows(
    source: StoredTensor,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
    allow_nonfinite: bool,
    start: int,
    end: int,
) -> Tensor:
    part = source.rows(start, end).to(device, dtype)
    check(part, name, allow_nonfinite)
    return part


def rows_of(tensor: Tensor, start: int, end: int) -> Tensor:
    """The counterpart of `checked_rows` for a tensor in memory."""
    return tensor[start:end]


class ScratchBuffer:
    """Reused memory for temporary tensors: if each were allocated and freed, they would fragment the memory between the
    tensors that are kept."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor; it overwrites the previous one."""
        size = math.prod(shape) * dtype.itemsize
        if self.bytes.numel() < size:
            self.bytes = torch.empty(0)
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        return self.bytes[:size].view(dtype).view(shape)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.bytes.untyped_storage().data_ptr()


class LeftOut(UserWarning):
    """Warning that tensors of a checkpoint are not loaded, because Onward does not compute with them."""


class MixedDtypes(UserWarning):
    """Warning that stored weights of different dtypes are loaded as one dtype."""


def common_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The dtype of most elements; warns of tensors with other dtypes."""
    elements = Counter[str]()
    for tensor in stored.values():
        elements[tensor.dtype] += math.prod(tensor.shape)
    (most, _), *_ = elements.most_common()
    if others := [name for name, tensor in stored.items() if tensor.dtype != most]:
        shown = ", ".join([f"{name} ({stored[name].dtype})" for name in others[:3]] + ["..."] * (len(others) > 3))
        warnings.warn(
            f"{len(others)} of the {len(stored)} tensors in the checkpoint are not {most} like the others: {shown}; "
            "all are loaded in the dtype of most elements, unless you set another dtype",
            MixedDtypes,
            stacklevel=1,
        )
    return FLOATS[most]


def mapped(source: StoredTensor, dtype: torch.dtype) -> Tensor | None:
    """The memory-mapped tensor if it has the requested dtype and torch's alignment; None if it must be copied."""
    if source.mapped is None or dtype != FLOATS[source.dtype]:
        return None
    tensor = source.mapped()
    return tensor if aligned(tensor) else None


def copied(
    sources: Mapping[str, StoredTensor],
    make: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
    allow_nonfinite: bool,
) -> Tensor:
    """Copy stored tensors of one shape, in pieces, into a new tensor (number of tensors, ...) that `make` allocates."""
    stack = make(len(sources), *next(iter(sources.values())).shape, dtype=dtype, device=device)
    for (name, source), tensor in zip(sources.items(), stack):
        if not source.shape and source.mapped:  # a single number has no rows
            tensor.copy_(source.mapped())
            check(tensor, name, allow_nonfinite)
            continue
        step = max(1, COPY_BYTES // tensor[0].nbytes)
        for start, part in zip(range(0, len(tensor), step), tensor.split(step)):
            part.copy_(source.rows(start, start + len(part)))
            check(part, name, allow_nonfinite)
    return stack


def find(
    family: Names, config: DecoderConfig, wanted: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the stored tensors for `wanted`, tensors on the meta device by name; files may omit the family's prefix,
    and all routing biases."""
    left, matched = with_routing_biases(family, config, wanted, stored), {}
    for name, shape in ((name, list(tensor.shape)) for name, tensor in wanted.items()):
        short = name if name in left else name.removeprefix(family.BASE)
        for part, other in getattr(family, "ALSO", {}).items():
            short = short if short in left else name.replace(part, other)
        if short not in left:
            raise UserError(f"the checkpoint has no tensor {name}, which its config asks for")
        tensor = matched[name] = left.pop(short)
        if tensor.shape != shape:
            raise UserError(f"tensor {short} has shape {tensor.shape}, but the config asks for {shape}")
        if tensor.dtype not in FLOATS:
            raise UserError(f"tensor {short} holds {tensor.dtype}: Onward reads weights as {', '.join(FLOATS)}")
    if config.tied:  # a head in the files equals the embedding: see `head_differs`
        for their, *_ in rows(family, config, {"head.weight": torch.empty(0)}):
            left.pop(str(their), None)
    ignored = "|".join(filter(None, (family.IGNORED, r"rotary_emb\.inv_freq$")))
    extra = [name for name in left if not re.search(ignored, name)]
    later = prediction_layers(extra, config.n_layers)
    if unknown := {name for name in {*extra} - {*later} if not adds_zeros(name, left[name])}:
        raise UserError(f"the checkpoint has a tensor {min(unknown)} that the model of its config does not have")
    if later:
        message = f"Layers for multi-token prediction are left out, with tensors such as {min(later)}"
        warnings.warn(LeftOut(message), stacklevel=2)
    return matched


def adds_zeros(name: str, tensor: StoredTensor) -> bool:
    """Whether a tensor is a bias of zeros, as quantized models store for layers without a bias."""
    return name.endswith(".bias") and len(tensor.shape) == 1 and not tensor.rows(0, tensor.shape[0]).any()


def with_routing_biases(
    family: Names, config: DecoderConfig, wanted: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The stored tensors, and zeros for the routing biases if none are stored, since the model was trained without
    them."""
    ours = {f"blocks.{layer}.mlp.router.routing_bias": None for layer in range(config.n_layers)}
    biases = {str(their) for their, *_ in rows(family, config, ours)} & wanted.keys()
    if any(name in stored or name.removeprefix(family.BASE) in stored for name in biases):
        return dict(stored)
    zeros = lambda start, end: torch.zeros(end - start)
    return {**stored, **{name: StoredTensor(list(wanted[name].shape), "F32", zeros) for name in biases}}


def aligned(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def check(tensor: Tensor, name: str, allow_nonfinite: bool) -> None:
    """Refuse elements that are not finite; makes no copy."""
    if not allow_nonfinite and not all(bound.isfinite() for bound in tensor.aminmax()):
        raise UserError(
            f"tensor {name} has NaN or infinite elements (as {tensor.dtype}): get the weights again, or load them "
            "as they are with --allow-nonfinite (allow_nonfinite=True)"
        )
