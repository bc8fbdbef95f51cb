"""A model as a Hugging Face folder: config.json, and its weights as one safetensors file or as shards with an index."""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onward.checkpoint.gguf.header import Header, opened
from onward.checkpoint.gguf.load import read_model
from onward.checkpoint.gguf.vocabulary import read_tokenizer
from onward.checkpoint.huggingface.names import head_differs, layers_of, packable, to_ours, to_theirs
from onward.checkpoint.huggingface.packed import quantization_config
from onward.checkpoint.huggingface.quantized import dequantized
from onward.checkpoint.weights import INDEX, StoredTensor, fill, refuse_pickles, split, stored_tensors
from onward.config.decoder import DecoderConfig
from onward.errors import UserError
from onward.families import HF, Family, express, family, keys_of, read
from onward.files import flush, read_json, written_whole
from onward.hub import WEIGHTS
from onward.kernels.quantized import NOT_QUANTIZED
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer, tokenizer_file
from onward.transforms.heads import NAME, add_head, head_labels
from onward.transforms.quantize import (
    ALREADY,
    Precision,
    QuantizedLinear,
    choose_layers,
    quantize_tensor,
)

DEPTHS = "num_hidden_layers", "n_layers", "n_layer", "num_layers"  # names of the number of layers in config.json


ALLOCATIONS = torch.empty, torch.full, torch.ones, torch.zeros


class SizeLimit(TorchFunctionMode):
    """For modules on the meta device: initialization is skipped, which would cost a second of imports, and allocating
    far more elements than a checkpoint has, or sizes that no tensor can have, raises a UserError."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.allocated = elements, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_:
            return kwargs["tensor"]
        if func not in ALLOCATIONS:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, OverflowError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"config.json or options ask for sizes that no tensor can have ({reason})") from None
        self.allocated += result.numel()
        if self.allocated > 4 * self.elements:  # a smaller difference is reported by the name of the tensor
            raise UserError(f"config.json asks for far more parameters than the {self.elements:,} in the files")
        return result


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model's folder; a UserError if it is no such folder."""
    refuse_pickles(folder)
    if folder.is_dir():
        if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
            raise UserError(f"{folder} holds an adapter: onward merge {folder} OUT makes a model of it, name OUT")
        return read_json(folder / "config.json")
    if folder.exists():
        raise UserError(f"{folder} is a file: name its folder, with a config.json beside the weights")
    raise UserError(f"there is no folder {folder}: name the folder of a model, such as runs/mybook")


def load_model(
    folder: Path | Header,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    allow_nonfinite: bool = False,
    quantize: str | None = None,
) -> tuple[Decoder, dict[str, Any]]:
    """The decoder in a folder or a GGUF file, which may be `opened`, with its config.json, or what GGUF has of it.

    Its dtype is that of its files (bf16 where they are dequantized, that of most elements where they are mixed) unless
    `dtype` is given.

    With `quantize`, "int8" or "int4", linear layers are quantized while they are read; layers that are stored so, by
    Onward or in the same form by others, stay quantized.

    A head that config.json ties to the embedding is untied, with a warning, where the files have another one.

    Weights that need no change are memory-mapped; writes to them never reach the files. Weights that are not finite
    raise a UserError unless `allow_nonfinite`.
    """
    where = torch.device(device or "cpu")
    path = folder.path if isinstance(folder, Header) else folder
    try:
        if isinstance(source := opened(folder), Header):
            hf, kind, config, stored = read_model(source)
            model = allocated(config, stored)
        else:
            hf = read_config(source)
            stored = dequantized(hf, stored_tensors(source))
            kind, config, model = outline(hf, stored, str(source / "config.json"))
        add_stored_head(model, stored, hf)
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
            kind,
            config,
            stored,
            wanted,
            dtype=dtype,
            device=where,
            allow_nonfinite=allow_nonfinite,
            precisions={f"{name}.weight": precision for name, precision in chosen.items()},
        )
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from None
    if config.tied and "head" in chosen:
        quantized["head.weight"] = quantize_tensor(ours["embed.weight"], chosen["head"])
    for name, (codes, scales) in quantized.items():
        layer = name.removesuffix(".weight")
        bias: Any = model.get_submodule(layer).bias
        model.set_submodule(layer, QuantizedLinear(codes, scales, bias))
    model.load_state_dict(ours, strict=False, assign=True)
    if config.tied and "head" not in chosen:
        model.head.weight = model.embed.weight
    return model.eval(), hf


def add_stored_head(model: Decoder, stored: Mapping[str, StoredTensor | Tensor], hf: HF) -> None:
    """Give a model the head of outputs that is among stored tensors, if there is one, with the labels in config.json;
    its weights are loaded with the others."""
    if (weight := stored.get(f"{NAME}.weight")) is None:
        return
    names, outputs = hf.get("id2label"), weight.shape[0]
    labels = [str(names.get(str(i), i)) for i in range(outputs)] if isinstance(names, Mapping) else range(outputs)
    with torch.device("meta"):
        add_head(model, [str(label) for label in labels])


def label_keys(model: Decoder) -> dict[str, Any]:
    """The keys of config.json for the head of outputs, as transformers writes them; {} where there is none."""
    labels = head_labels(model)
    if not labels:
        return {}
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {v: i for i, v in enumerate(labels)},
    }


def load_tokenizer(path: Path | Header) -> Tokenizer | None:
    """The tokenizer in a model's folder or GGUF file, which may be `opened`; None where it has none."""
    if isinstance(source := opened(path), Header):
        return read_tokenizer(source)
    return Tokenizer.load(source) if tokenizer_file(source) else None


def required_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a model's folder or GGUF file; a UserError where it has none."""
    if not isinstance(source := opened(path), Header):
        return Tokenizer.load(source)
    if (found := read_tokenizer(source)) is None:
        raise UserError(f"{path} has no tokenizer: name a file or folder that holds one")
    return found


def stored_weights(path: Path) -> Mapping[str, StoredTensor]:
    """The tensors of the model in a folder or a GGUF file, by name; reads headers only."""
    source = opened(path)
    return read_model(source)[3] if isinstance(source, Header) else stored_tensors(source)


def outline(hf: HF, stored: Mapping[str, StoredTensor], where: str) -> tuple[Any, DecoderConfig, Decoder]:
    """The family, the DecoderConfig, and the Decoder on the meta device; `where` is the path of config.json.

    Raises a UserError if the files have far fewer parameters, before anything large is allocated.
    """
    tables = [hf, *(value for value in hf.values() if isinstance(value, dict))]
    depths = [table[key] for table in tables for key in DEPTHS if isinstance(table.get(key), int | float)]
    check_depth(max(depths, default=0), stored)  # before a family loops over the layers
    kind, config = read(hf, where)
    check_depth(config.n_layers, stored)
    model = allocated(config, stored)
    if config.tied and head_differs(kind, config, stored):
        config = replace(config, tied=False)
        model = allocated(config, stored)
    return kind, config, model


def allocated(config: DecoderConfig, stored: Mapping[str, StoredTensor]) -> Decoder:
    """The Decoder on the meta device."""
    with torch.device("meta"), SizeLimit(sum(math.prod(tensor.shape) for tensor in stored.values())):
        return Decoder(config)


def check_depth(layers: float, stored: Mapping[str, StoredTensor]) -> None:
    """Raise a UserError if there are fewer tensors than layers."""
    if layers > len(stored):
        raise UserError(f"config.json asks for {layers} layers, and the files hold only {len(stored)} tensors")


class OwnLayout(UserWarning):
    """A quantized model whose family has no place for packed integers."""


class KeptLayers(UserWarning):
    """Linear layers that cannot be quantized."""


def save_model(model: Decoder, folder: Path, extra: HF | None = None, shard_bytes: float = math.inf) -> None:
    """Write config.json and the weights of a model, see `save_weights`; quantized layers as `packed.py` says.

    A quantized head is a weight of its own, so that the saved config.json does not tie it to the embedding.
    """
    layers = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    config = replace(model.config, tied=False) if "head.weight" in layers else model.config
    extra = {**(extra or {}), **label_keys(model)}
    save_weights(config, {**dict(model.named_parameters()), **layers}, folder, extra, shard_bytes)


def save_weights(
    config: DecoderConfig,
    ours: Mapping[str, Tensor | QuantizedLinear],
    folder: Path,
    extra: HF,
    shard_bytes: float = math.inf,
) -> None:
    """Write config.json and the weights, given under our names, as shards where they exceed `shard_bytes`.

    All files are written under other names and flushed before any is put in place. `extra` are keys for config.json
    beside those of the architecture, such as token ids, or the config.json that was loaded: it is kept where it still
    describes the model.
    """
    layers = {name: layer for name, layer in ours.items() if isinstance(layer, QuantizedLinear)}
    plain = {name: tensor for name, tensor in ours.items() if isinstance(tensor, Tensor)}
    meta: dict[str, Tensor | QuantizedLinear] = {name: tensor.to("meta") for name, tensor in plain.items()}
    meta |= {n: QuantizedLinear(layer.codes.to("meta"), layer.scales.to("meta"), None) for n, layer in layers.items()}
    hf = describe(config, extra, lambda kind: packable(kind, config, meta))
    kind = family(hf["model_type"])
    dtype = str(plain["embed.weight"].dtype).removeprefix("torch.")
    hf |= {key: dtype for key in ("dtype", "torch_dtype") if key == "dtype" or key in hf}
    if layers:
        hf["quantization_config"] = quantization_config(*layers_of(kind, config, meta))
        if hf["model_type"] == "onward" != extra.get("model_type", "onward"):
            why = f"{extra['model_type']} stores weights in an order in which packed integers have no place"
            warnings.warn(OwnLayout(f"only Onward can read this folder (model_type onward): {why}"), stacklevel=2)
    outlines = dict(to_theirs(kind, config, meta))
    files = split(outlines, shard_bytes)
    texts = {"config.json": hf}
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        texts[INDEX] = {"metadata": {"total_size": sum(t.nbytes for t in outlines.values())}, "weight_map": places}
    with ExitStack() as stack:  # the first file entered is put in place last
        beside = {name: stack.enter_context(written_whole(folder / name)) for name in (*texts, *files)}
        tensors = to_theirs(kind, config, ours)
        for file, names in files.items():
            fill(beside[file], {name: outlines[name] for name in names}, islice(tensors, len(names)))
        for name, value in texts.items():
            beside[name].write_text(json.dumps(value, indent=2) + "\n")
        for new in beside.values():
            flush(new)
        place = folder / "config.json"
        unchanged = place.exists() and place.read_bytes() == beside[place.name].read_bytes()
        stale = [old for old in folder.iterdir() if WEIGHTS.fullmatch(old.name) and old.name not in beside]
        if stale or len(files) > 1 or not unchanged:
            place.unlink(missing_ok=True)  # without it, no mixture of old and new files loads
            for old in stale:
                old.unlink()


def describe(
    config: DecoderConfig, original: HF, accepts: Callable[[Family], bool] = lambda family: True
) -> dict[str, Any]:
    """The config.json of a decoder: the original where it still describes the decoder, else the original with its
    family's keys for this decoder, else the keys of the first family that can express it, with the original's token
    ids. Only of families that are accepted."""
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
