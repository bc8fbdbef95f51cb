"""Loads models from folders, files and the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from onward.api.language_model import LanguageModel
from onward.base.arguments import checked
from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.checkpoint.draft_heads import draft_beside
from onward.checkpoint.load import load_source, open_source
from onward.checkpoint.peft.adapters import load_with_adapters
from onward.generation.drafts.paced import is_small
from onward.hub.folder import DRAFT, is_adapter, locate
from onward.transforms.extend import extended


@checked
def load(
    model: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    revision: str = "",
    quantize: Literal["int8", "int4"] | None = None,
    adapter_folder: str | Path | Sequence[str | Path] = (),
    rope: str | None = None,
    allow_nonfinite: bool = False,
) -> LanguageModel:
    """Load a model from a Hugging Face folder, a GGUF file, or the Hugging Face hub (org/name, org/name@revision,
    hf://org/name), by default in the dtype of its files and on the fastest available device.

    If `model` is not an existing path, its files are downloaded to the cache of `huggingface_hub`, unless they are
    already there; `revision` is a branch, a tag or a commit, by default main. `quantize` keeps the weights of linear
    layers as int8, or as int4 in groups of 32; a warning gives the number of layers that cannot be quantized. A folder
    saved from such a model stays quantized. Raises a UserError for weights that are NaN or infinite, unless
    `allow_nonfinite`.

    `adapter_folder` is the folder of an adapter of this model, as PEFT or `save_adapter` writes it, or a list of
    folders. Each adapter is named after its folder; the first is used unless a request chooses another. If `model` is
    itself an adapter, the base that it names is loaded with it. Raises a UserError for an adapter of another base. A
    draft head (`onward finetune MODEL --method draft`) or an EAGLE-3 draft in the subfolder `draft` is also loaded,
    unless the model is so small that drafts would save no time; that of another model is skipped with a warning.

    `rope` extends the context of a model with rotary positions by a scaling and a factor: "yarn:2", "linear:2",
    "dynamic:2", "llama3:8".
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(f"dtype is {dtype!r}: give a floating-point dtype such as torch.float32, or None")
    device = choose_device(device)
    folder = locate(model, revision)
    folders = [adapter_folder] if isinstance(adapter_folder, str | Path) else adapter_folder
    adapter_folders = [Path(one) for one in folders]
    if adapter_folders or is_adapter(folder):
        decoder, hf, source = load_with_adapters(
            folder, adapter_folders, dtype, device, allow_nonfinite=allow_nonfinite, quantize=quantize
        )
    else:
        source = open_source(folder)
        decoder, hf = load_source(source, dtype, device, allow_nonfinite=allow_nonfinite, quantize=quantize)
    if rope is not None:
        decoder.config = extended(decoder.config, rope)
    pays = (folder / DRAFT).is_dir() and not is_small(decoder.config)
    draft_head = draft_beside(folder, decoder) if pays else None
    return LanguageModel(decoder, source.tokenizer(), hf, draft_head, folder)
