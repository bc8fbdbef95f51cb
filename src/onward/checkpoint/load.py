"""Loads a model from any format: opens its source, reads its tensors under the names of Decoder's parameters, and
assigns them to a decoder."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.gguf.header import is_gguf
from onward.checkpoint.gguf.load import GGUFFile
from onward.checkpoint.huggingface.folder import ModelFolder
from onward.checkpoint.names import to_ours
from onward.checkpoint.source import ModelSource
from onward.checkpoint.weights import StoredTensor
from onward.families import HF
from onward.kernels.quantized import NOT_QUANTIZED
from onward.model.decoder import Decoder
from onward.transforms.heads import NAME, add_head
from onward.transforms.quantize import (
    ALREADY,
    Precision,
    QuantizedLinear,
    choose_layers,
    quantize_tensor,
    replace_layers,
)


class KeptLayers(UserWarning):
    """Warning that linear layers cannot be quantized and keep their weights."""


def open_source(path: Path) -> ModelSource:
    """The source of the model at a path: a GGUF file, or else a folder, which need not exist yet."""
    return GGUFFile(path) if path.is_file() and is_gguf(path) else ModelFolder(path)


def load_model(
    path: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    allow_nonfinite: bool = False,
    quantize: str | None = None,
) -> tuple[Decoder, dict[str, Any]]:
    """Load the decoder in a folder or a GGUF file. Returns it with its config.json; for a GGUF file, with the keys of
    config.json that follow from the file.

    `dtype` defaults to the dtype of the files: of most elements if they are mixed, fp16 or bf16 if they are
    dequantized. With `quantize`, "int8" or "int4", linear layers are quantized while they are read; this raises a
    UserError if the files hold integers that Onward computes with, which without `quantize` stay quantized. A head that
    config.json ties to the embedding is untied, with a warning, if the files hold a different head.

    Weights that need no change are memory-mapped; writes to them never reach the files. Raises a UserError if a weight
    is not finite, unless `allow_nonfinite`.
    """
    return load_source(open_source(path), dtype, device, allow_nonfinite=allow_nonfinite, quantize=quantize)


def load_source(
    source: ModelSource,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    allow_nonfinite: bool = False,
    quantize: str | None = None,
) -> tuple[Decoder, dict[str, Any]]:
    """Like `load_model`, but from an opened source."""
    try:
        outline = source.outline()
        model, stored, tied = outline.model, outline.stored, outline.config.tied
        add_stored_head(model, stored, outline.hf)
        wanted = dict(model.named_parameters())  # a tied head is not among them
        chosen: dict[str, Precision] = {}
        if quantize is not None:
            if any(tensor.quantized for tensor in stored.values()):
                raise UserError(ALREADY)
            chosen, kept = choose_layers(model, quantize)
            if kept:
                message = f"{len(kept)} linear layers, such as {kept[0]}, stay as they are: {NOT_QUANTIZED}"
                warnings.warn(KeptLayers(message), stacklevel=2)
        ours, quantized = to_ours(
            outline.names,
            outline.config,
            stored,
            wanted,
            dtype=dtype,
            device=torch.device(device or "cpu"),
            allow_nonfinite=allow_nonfinite,
            precisions={f"{name}.weight": precision for name, precision in chosen.items()},
        )
    except UserError as error:
        raise error if str(source.path) in str(error) else UserError(f"{source.path}: {error}") from None
    if tied and "head" in chosen:
        quantized["head.weight"] = quantize_tensor(ours["embed.weight"], chosen["head"])
    layers = {}
    for name, (codes, scales) in quantized.items():
        layer = name.removesuffix(".weight")
        bias: Any = model.get_submodule(layer).bias
        layers[layer] = QuantizedLinear(codes, scales, bias)
    if layers:
        replace_layers(model, layers)
    model.load_state_dict(ours, strict=False, assign=True)
    if tied and "head" not in chosen:
        model.head.weight = model.embed.weight
    return model.eval(), outline.hf


def add_stored_head(model: Decoder, stored: Mapping[str, StoredTensor | Tensor], hf: HF) -> None:
    """If the stored tensors include a classification or value head, add this head to the model; its weights are loaded
    with the others."""
    if (weight := stored.get(f"{NAME}.weight")) is None:
        return
    names, outputs = hf.get("id2label"), weight.shape[0]
    labels = [str(names.get(str(i), i)) for i in range(outputs)] if isinstance(names, Mapping) else range(outputs)
    with torch.device("meta"):
        add_head(model, [str(label) for label in labels])
