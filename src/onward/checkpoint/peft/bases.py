"""The base of an adapter: where it is, and whether it is the model that the adapter was made for.

base.json beside an adapter names the base by its folder and a checksum of its weights; PEFT ignores this file.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from onward.checkpoint.huggingface.folder import stored_weights
from onward.errors import UserError
from onward.files import read_json
from onward.hub import locate

CONFIG, BASE = "adapter_config.json", "base.json"


@dataclass(frozen=True)
class BaseModel:
    """The base of an adapter."""

    folder: str  # where it was
    checksum: str  # of its weights, see `weights_checksum`; "": unknown
    labels: tuple[str, ...] = ()  # of the head of outputs that was trained beside the adapter


def weights_checksum(folder: Path) -> str:
    """A checksum of the weights in a model's folder, whatever the files they are spread over."""
    integers = {"F64": torch.int64, "F32": torch.int32, "F16": torch.int16, "BF16": torch.int16}
    facts = []
    for name, tensor in sorted(stored_weights(folder).items()):
        bits = tensor.mapped() if tensor.mapped else tensor.rows(0, tensor.shape[0])
        total = int(bits.view(integers.get(tensor.dtype, torch.uint8)).sum(dtype=torch.int64))
        facts.append([name, tensor.dtype, tensor.shape, total])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in place of a model."""
    return (folder / CONFIG).exists() and not (folder / "config.json").exists()


def base_of(folder: Path) -> BaseModel:
    """The base that an adapter was made for."""
    if (folder / BASE).exists():
        record = read_json(folder / BASE)
        labels = tuple(map(str, record.get("labels") or ()))
        return BaseModel(str(record.get("folder", "")), str(record.get("checksum", "")), labels)
    check_adapter_folder(folder)
    return BaseModel(str(read_json(folder / CONFIG).get("base_model_name_or_path") or ""), "")


def base_folder(adapter_folder: Path) -> Path:
    """The folder of the base that an adapter names; a UserError where it is not there."""
    base = base_of(adapter_folder).folder
    try:
        return locate(base, "")
    except UserError:
        raise UserError(
            f"{adapter_folder} is an adapter of {base or 'an unknown base'}, and there is no model there: name "
            "its base as the model, and give this folder as adapter_folder, or --adapter"
        ) from None


def check_adapter_folder(folder: Path) -> None:
    """Raise a UserError where a folder holds no adapter."""
    if not (folder / CONFIG).exists():
        raise UserError(f"there is no {CONFIG} in {folder}: name the folder of an adapter")


def check_base(adapter_folder: Path, base: Path) -> None:
    """Raise a UserError where an adapter was made for other weights than those in the folder `base`."""
    wanted = base_of(adapter_folder)
    if wanted.checksum and (found := weights_checksum(base)) != wanted.checksum:
        raise UserError(
            f"{adapter_folder} was made for another base: {wanted.folder} with checksum {wanted.checksum}, "
            f"and {base} has checksum {found}; load it with its own base"
        )
