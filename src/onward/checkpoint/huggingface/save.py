"""Writes a model as a Hugging Face folder: config.json, and its weights as one safetensors file or as shards."""

import json
import math
import warnings
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.base.files import atomic_write, flush
from onward.checkpoint.huggingface.packable import layers_of, packable
from onward.checkpoint.names import to_theirs
from onward.checkpoint.packed import quantization_config
from onward.checkpoint.weights import INDEX, fill, split
from onward.config.decoder import DecoderConfig
from onward.families import HF, Family, express, family, keys_of, read
from onward.hub.names import WEIGHTS
from onward.model.decoder import Decoder
from onward.transforms.heads import head_labels
from onward.transforms.quantize import QuantizedLinear


class OwnLayout(UserWarning):
    """Warning that a quantized model whose family cannot store packed integers gets Onward's own tensor names, which no
    other program reads."""


def label_keys(model: Decoder) -> dict[str, Any]:
    """Keys of config.json for a classification head, as transformers writes them."""
    labels = head_labels(model)
    if not labels:
        return {}
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {v: i for i, v in enumerate(labels)},
    }


def save_model(model: Decoder, folder: Path, extra: HF | None = None, shard_bytes: float = math.inf) -> None:
    """Write config.json and the weights of a model to a folder, see `save_weights`; quantized layers in the format of
    `packed.py`.

    A quantized head is a separate weight, so the saved config.json does not tie it to the embedding. Raises a
    UserError, before anything is written, for pruned or parametrized weights.
    """
    layers = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    config = replace(model.config, tied=False) if "head.weight" in layers else model.config
    extra = {**(extra or {}), **label_keys(model)}
    ours: dict[str, Tensor | QuantizedLinear] = {**dict(model.named_parameters()), **layers}
    check_complete(config, ours)
    save_weights(config, ours, folder, extra, shard_bytes)


def check_complete(config: DecoderConfig, names: Container[str]) -> None:
    """Raise a UserError unless all parameters of a decoder with this config are among the `names` of a model."""
    with torch.device("meta"):
        outline = Decoder(config)
    for name, _ in outline.named_parameters():
        if name not in names:
            raise UserError(
                f"Cannot save the model, because {name} is not one of its parameters: if it is pruned or parametrized, "
                "first call torch.nn.utils.prune.remove or parametrize.remove_parametrizations"
            )


def save_weights(
    config: DecoderConfig,
    ours: Mapping[str, Tensor | QuantizedLinear],
    folder: Path,
    extra: HF,
    shard_bytes: float = math.inf,
) -> None:
    """Write config.json and the weights `ours`, as shards if they exceed `shard_bytes`.

    All files are written under temporary names and flushed before the first is renamed. `extra` holds more keys for
    config.json, such as token ids, or the config.json of the loaded model, which is kept as far as it still describes
    the model."""
    layers = {name: layer for name, layer in ours.items() if isinstance(layer, QuantizedLinear)}
    plain = {name: tensor for name, tensor in ours.items() if isinstance(tensor, Tensor)}
    meta: dict[str, Tensor | QuantizedLinear] = {name: tensor.to("meta") for name, tensor in plain.items()}
    meta |= {n: QuantizedLinear(layer.codes.to("meta"), layer.scales.to("meta"), None) for n, layer in layers.items()}
    hf, kind = described(config, meta, extra, plain["embed.weight"].dtype)
    if layers:
        hf["quantization_config"] = quantization_config(*layers_of(kind, config, meta))
        if hf["model_type"] == "onward" != extra.get("model_type", "onward"):
            why = f"{extra['model_type']} stores weights in an order that packed integers do not allow"
            warnings.warn(OwnLayout(f"only Onward can read this folder (model_type onward): {why}"), stacklevel=2)
    outlines = dict(to_theirs(kind, config, meta))
    files = split(outlines, shard_bytes)
    texts = {"config.json": hf}
    if len(files) > 1:
        file_of = {name: file for file, names in files.items() for name in names}
        texts[INDEX] = {"metadata": {"total_size": sum(t.nbytes for t in outlines.values())}, "weight_map": file_of}
    with ExitStack() as stack:  # the first file entered is put in place last
        temporary = {name: stack.enter_context(atomic_write(folder / name)) for name in (*texts, *files)}
        tensors = to_theirs(kind, config, ours)
        for file, names in files.items():
            fill(temporary[file], {name: outlines[name] for name in names}, islice(tensors, len(names)))
        for name, value in texts.items():
            temporary[name].write_text(json.dumps(value, indent=2) + "\n")
        for new in temporary.values():
            flush(new)
        config_path = folder / "config.json"
        unchanged = config_path.exists() and config_path.read_bytes() == temporary[config_path.name].read_bytes()
        stale = [old for old in folder.iterdir() if WEIGHTS.fullmatch(old.name) and old.name not in temporary]
        if stale or len(files) > 1 or not unchanged:
            config_path.unlink(missing_ok=True)  # without it, a mixture of old and new files cannot be loaded
            for old in stale:
                old.unlink()


def described(
    config: DecoderConfig, meta: Mapping[str, Tensor | QuantizedLinear], extra: HF, dtype: torch.dtype
) -> tuple[dict[str, Any], Family]:
    """(config.json, family) for weights, given on the meta device."""
    hf = describe(config, extra, lambda kind: packable(kind, config, meta))
    name = str(dtype).removeprefix("torch.")
    return hf | {key: name for key in ("dtype", "torch_dtype") if key == "dtype" or key in hf}, family(hf["model_type"])


def describe(
    config: DecoderConfig, original: HF, accepts: Callable[[Family], bool] = lambda family: True
) -> dict[str, Any]:
    """A config.json that describes a decoder exactly, in a family for which `accepts` is true. In order of preference:

    1. `original`, unchanged; 2. `original`, with its family's keys set for this decoder; 3. the keys of the first
    family that can express the decoder, with the token ids and labels of `original`."""
    original = {key: value for key, value in original.items() if key != "quantization_config"}
    unpadded = {"pad_token_id": None}  # the default of transformers may be outside of this vocabulary
    if "model_type" not in original:
        return unpadded | original | express(config, accepts)
    kind = family(original["model_type"])
    if accepts(kind):
        if read(original)[1] == config:
            return original
        changed = keys_of(kind, config, original)
        if changed is not None:
            return changed
    ids = {
        key: value for key, value in original.items() if key.endswith("_token_id") or key in ("id2label", "label2id")
    }
    return unpadded | ids | express(config, accepts)
