"""A model as a Hugging Face folder: config.json and model.safetensors."""

from pathlib import Path
from typing import Any

import torch

from onward.checkpoint.weights import read_tensors, to_ours, to_theirs, write_tensors
from onward.families import HF, express, family, read
from onward.files import read_json, write_json
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder


def load_model(
    folder: Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[Decoder, dict[str, Any]]:
    """The decoder in a folder, in its files' precision unless `dtype` is given, and its config.json."""
    hf = read_json(folder / "config.json")
    kind, config = read(hf)
    with torch.device("meta"):
        model = Decoder(config)
    theirs = read_tensors(folder / "model.safetensors")
    wanted = dict(model.named_parameters())  # a tied head is not among them
    if config.tied:
        for name in to_theirs(kind, config, {"head.weight": model.head.weight}):
            theirs.pop(name, None)
    ours = to_ours(kind, config, theirs, wanted)
    model.load_state_dict(ours, strict=False, assign=True)
    if config.tied:
        model.head.weight = model.embed.weight
    return model.to(device=device, dtype=dtype).eval(), hf


def save_model(model: Decoder, folder: Path, extra: HF | None = None) -> None:
    """Write config.json and model.safetensors, each whole or not at all.

    `extra` are keys for config.json besides those of the architecture (token ids, say); a config.json that was
    loaded is kept where it still says what the model is.
    """
    hf = describe(model.config, extra or {})
    write_tensors(
        folder / "model.safetensors", to_theirs(family(hf["model_type"]), model.config, dict(model.named_parameters()))
    )
    write_json(folder / "config.json", hf | {"dtype": str(model.embed.weight.dtype).removeprefix("torch.")})


def describe(config: DecoderConfig, original: HF) -> dict[str, Any]:
    """The config.json of a decoder: the original where it still says the same, else rewritten."""
    if "model_type" in original and read(original)[1] == config:
        return dict(original)
    return {**original, **express(config)}
