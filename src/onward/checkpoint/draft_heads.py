"""The folder of a draft head: config.json, which records the model that the head belongs to, and model.safetensors.

`onward finetune MODEL --method draft` writes it as MODEL/draft, where `onward.load` finds it. A draft head does not
affect the generated text, but its drafts are good only for the model that it was trained on: `mismatch` compares
checksums of the tokenizer and of rows of each weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from onward.base import fields
from onward.base.errors import UserError
from onward.base.files import file_sha256, read_json
from onward.checkpoint.eagle import is_eagle, load_eagle
from onward.checkpoint.part_files import PartFiles
from onward.checkpoint.peft.bases import BaseModel, weights_checksum
from onward.checkpoint.weights import SINGLE, read_tensors
from onward.families import HF
from onward.hub.folder import DRAFT, is_adapter, locate
from onward.model.decoder import Decoder
from onward.model.draft_head import DraftHead
from onward.model.eagle import EagleDecoder
from onward.transforms.draft_head import draft_head_of

CONFIG, KIND = "config.json", "onward_draft_head"
SIZES = "hidden_size", "intermediate_size", "vocab_size"
ROWS = 4  # rows of each weight in a model's checksum: reading all rows would take as long as loading the model


class ForeignDraft(UserWarning):
    """Warning that the draft in the folder of a model belongs to another model and is not used."""


def is_draft_head(folder: Path) -> bool:
    return (folder / CONFIG).exists() and read_json(folder / CONFIG).get("model_type") == KIND


def is_draft(folder: Path) -> bool:
    """Return whether a folder holds a draft head or an EAGLE-3 draft. Raises a UserError for drafts of other kinds."""
    return is_draft_head(folder) or is_eagle(folder)


def identity(folder: Path) -> str:
    """Return the string by which a draft head identifies its model: checksums of some rows of each weight, and of the
    tokenizer."""
    tokenizer = folder / "tokenizer.json"
    return f"{weights_checksum(folder, ROWS)} {file_sha256(tokenizer)[:16] if tokenizer.exists() else '-'}"


def draft_head_files(
    model: Decoder, hf: HF, base: BaseModel, gather: Callable[[Tensor], Tensor] = Tensor.detach
) -> PartFiles:
    """Collect the tensors and the config.json of the draft head of `model`; `gather` returns the full tensor of a
    weight, if processes divide the model."""
    head = draft_head_of(model)
    config = {
        "model_type": KIND,
        "hidden_size": head.d_model,
        "intermediate_size": head.d_ff,
        "vocab_size": model.config.vocab_size,
        "base": {name: value for name, value in asdict(base).items() if name in ("folder", "checksum")},
    }
    return PartFiles(SINGLE, {name: gather(tensor) for name, tensor in head.named_parameters()}, {CONFIG: config})


def draft_base(folder: Path) -> Path:
    """Return the folder of the model that the draft head in `folder` belongs to."""
    return locate(str((read_json(folder / CONFIG).get("base") or {}).get("folder", "")))


def mismatch(folder: Path, base: Path) -> str:
    """Return an error message if the draft head in `folder` was made for another model than that in `base`, otherwise
    ""."""
    record = read_json(folder / CONFIG).get("base") or {}
    known, now = str(record.get("checksum", "")).split(), identity(base).split()
    if known == now:
        return ""
    differs = "another tokenizer" if known[:1] == now[:1] else "other weights"
    return (
        f"the draft {folder} was made for another model than {base}, which has {differs}: remove it, and make one "
        f"with onward finetune {base} DATA --method draft"
    )


def draft_beside(folder: Path, model: Decoder) -> DraftHead | EagleDecoder | None:
    """Load the draft in the folder `folder` of `model`. Returns None if there is none or, with a warning, if it does
    not belong to the model."""
    if is_adapter(folder) or not is_draft(folder / DRAFT):
        return None
    try:
        return draft_of(folder / DRAFT, folder, model)
    except UserError as error:
        warnings.warn(ForeignDraft(f"{error} (until then, it is not used)"), stacklevel=2)
        return None


def draft_of(folder: Path, base: Path, model: Decoder) -> DraftHead | EagleDecoder:
    """Load the draft head or the EAGLE-3 draft in `folder` for `model`, which is in `base`. Raises a UserError if it
    was made for another model, as far as the folder tells."""
    if not is_draft_head(folder):
        return load_eagle(folder, model)
    if reason := mismatch(folder, base):
        raise UserError(reason[0].upper() + reason[1:])
    return load_draft_head(folder, model)


def load_draft_head(folder: Path, model: Decoder) -> DraftHead:
    """Load the draft head in `folder`, in the dtype and on the device of `model`. Raises a UserError if its sizes are
    not those of the model, and for tensors that do not fit."""
    config = read_json(folder / CONFIG)
    sizes = {name: fields.convert(int, config.get(name), f"{folder / CONFIG}.{name}") for name in SIZES}
    for name, wanted in {"hidden_size": model.config.d_model, "vocab_size": model.config.vocab_size}.items():
        if sizes[name] != wanted:
            raise UserError(
                f"{folder / CONFIG} has {name} {sizes[name]}, but the model has {wanted}: use the model's own draft"
            )
    with torch.device("meta"):
        head = DraftHead(sizes["hidden_size"], sizes["intermediate_size"])
    tensors = read_tensors(folder / SINGLE)
    wanted_shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != wanted_shapes:
        raise UserError(f"{folder / SINGLE} does not hold the tensors of a draft head: make a new one")
    placed = {name: tensor.to(model.device, model.dtype) for name, tensor in tensors.items()}
    head.load_state_dict(placed, assign=True)
    return head.requires_grad_(False).eval()
