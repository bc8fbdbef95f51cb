"""Tensors on disk and in the model: safetensors files, their names and ours."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from onward.errors import UserError
from onward.families import Family
from onward.files import written_whole
from onward.model.config import DecoderConfig


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped into memory; a UserError if it is missing, cut off or not one."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"there is no {path.name} in {path.parent}: name a folder that holds a model") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is cut off or not a safetensors file ({error}): copy or download it again") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file, whole or not at all."""
    with written_whole(path) as new:
        try:
            save_file({n: t.detach().contiguous() for n, t in tensors.items()}, new, metadata={"format": "pt"})
        except SafetensorError as error:  # it wraps the system's error in text
            raise UserError(f"cannot write {path}: {error}; what was there is kept") from error


def rows(family: Family, config: DecoderConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple]:  # type: ignore[type-arg]
    """The family's table for the tensors a model has: (their names, our names, into ours, back to theirs).

    A tensor of ours without a row keeps its name.
    """
    same = lambda t: t
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


def to_ours(
    family: Family, config: DecoderConfig, theirs: Mapping[str, Tensor], model: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors under our names from tensors under theirs; `model` has the shapes that are expected.

    A UserError names a tensor that is missing, left over, or of the wrong shape or type.
    """
    left = dict(theirs)
    found: dict[str, Tensor] = {}
    for their, names, into, _ in rows(family, config, model):
        pieces = their if isinstance(their, list) else [their]
        if missing := [name for name in pieces if name not in left]:
            raise UserError(f"the checkpoint has no tensor {missing[0]}, which its config.json asks for")
        tensors = [left.pop(name) for name in pieces]
        tensor = into(torch.stack(tensors) if isinstance(their, list) else tensors[0])
        shape = [sum(model[n].size(0) for n in names), *model[names[0]].shape[1:]]
        if list(tensor.shape) != shape:
            raise UserError(f"tensor {pieces[0]} has shape {list(tensor.shape)}, and config.json asks for {shape}")
        if not tensor.is_floating_point():
            raise UserError(f"tensor {pieces[0]} holds {tensor.dtype}: Onward reads weights in floating point")
        pieces_of_ours = tensor.split([model[n].size(0) for n in names])
        found.update(
            (name, piece.contiguous()) for name, piece in zip(names, pieces_of_ours)
        )  # fused optimisers ask so
    if left:
        raise UserError(f"the checkpoint has a tensor {min(left)} that its config.json has no place for")
    return found


def to_theirs(family: Family, config: DecoderConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under their names from tensors under ours."""
    found: dict[str, Tensor] = {}
    for their, names, _, back in rows(family, config, ours):
        tensor = back(torch.cat([ours[n] for n in names]) if len(names) > 1 else ours[names[0]])
        found |= zip(their, tensor.unbind()) if isinstance(their, list) else {their: tensor}
    return found
