"""The base of an adapter: its location, and the check that it is the model for which the adapter was trained.

base.json in an adapter's folder names the base by its folder and a checksum of its weights; PEFT ignores this file.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from onward.base.errors import UserError
from onward.base.files import read_json
from onward.checkpoint.load import open_source
from onward.hub.folder import locate

CONFIG, BASE = "adapter_config.json", "base.json"


@dataclass(frozen=True)
class BaseModel:
    """base.json: the folder and checksum of an adapter's base, and facts that PEFT's files lack."""

    folder: str  # folder of the base when the adapter was saved
    checksum: str  # checksum of the base's weights, see `weights_checksum`; "": unknown
    labels: tuple[str, ...] = ()  # labels of the classification head trained with the adapter
    subtracted: bool = False  # whether the second half of each rank only subtracts the initial product of A and B


def weights_checksum(folder: Path, rows: int | None = None) -> str:
    """A checksum of a model's weights, 16 hexadecimal digits, independent of the files that hold them; of the first
    `rows` rows of each weight, if given."""
    integers = {"F64": torch.int64, "F32": torch.int32, "F16": torch.int16, "BF16": torch.int16}
    facts = []
    for name, tensor in sorted(open_source(folder).stored().items()):
        whole = rows is None or not tensor.shape
        bits = tensor.mapped() if tensor.mapped and whole else tensor.rows(0, min(tensor.shape[0], rows or 1 << 62))
        total = int(bits.view(integers.get(tensor.dtype, torch.uint8)).sum(dtype=torch.int64))
        facts.append([name, tensor.dtype, tensor.shape, total])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def base_of(folder: Path) -> BaseModel:
    """base.json of an adapter or, without one, the base's name in adapter_config.json."""
    if (folder / BASE).exists():
        record = read_json(folder / BASE)
        labels = tuple(map(str, record.get("labels") or ()))
        base, checksum = (str(record.get(key, "")) for key in ("folder", "checksum"))
        return BaseModel(base, checksum, labels, record.get("subtracted") is True)
    check_adapter_folder(folder)
    return BaseModel(str(read_json(folder / CONFIG).get("base_model_name_or_path") or ""), "")


def base_folder(adapter_folder: Path) -> Path:
    base = base_of(adapter_folder).folder
    try:
        return locate(base, "")
    except UserError:
        raise UserError(
            f"Cannot find {base or 'the unknown base'}, the base of the adapter {adapter_folder}: name the base as the "
            "model, and give this folder as adapter_folder, or --adapter"
        ) from None


def check_adapter_folder(folder: Path) -> None:
    if not (folder / CONFIG).exists():
        raise UserError(f"there is no {CONFIG} in {folder}: name the folder of an adapter")


def check_base(adapter_folder: Path, base: Path) -> None:
    wanted = base_of(adapter_folder)
    if wanted.checksum and (actual := weights_checksum(base)) != wanted.checksum:
        raise UserError(
            f"{adapter_folder} was made for another base: {wanted.folder} with checksum {wanted.checksum}, "
            f"but {base} has checksum {actual}; load it with its own base"
        )
