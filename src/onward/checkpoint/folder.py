"""A model as a Hugging Face folder: config.json, and its weights as one safetensors file or as shards with an index."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onward.checkpoint.names import to_ours, to_theirs
from onward.checkpoint.quantized import dequantized
from onward.checkpoint.weights import INDEX, OURS, Stored, fill, refuse_pickles, split, stored_tensors
from onward.errors import UserError
from onward.families import HF, express, family, keys_of, presets, read
from onward.files import flush, read_json, written_whole
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder

DEPTHS = "num_hidden_layers", "n_layers", "n_layer", "num_layers"  # how families call the number of layers


class Outline(TorchFunctionMode):
    """For a module on the meta device: no random numbers are drawn, which would cost a second of imports, and to make
    far more than the `held` numbers is a UserError."""

    def __init__(self, held: int) -> None:
        super().__init__()
        self.held, self.made = held, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_:
            return kwargs["tensor"]
        result = func(*args, **kwargs)
        if func in (torch.empty, torch.full, torch.ones, torch.zeros):
            self.made += result.numel()
            if self.made > 4 * self.held:  # where less is missing, the tensor will be named
                raise UserError(f"config.json asks for far more parameters than the {self.held:,} that the files hold")
        return result


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model's folder; a UserError says what the name is if it is no such folder."""
    refuse_pickles(folder)
    if folder.is_dir():
        return read_json(folder / "config.json")
    name, ours = str(folder), "name the folder of a model, such as runs/mybook"
    if folder.exists():
        raise UserError(f"{name} is a file: name its folder, with a config.json beside the weights")
    if re.match(r"https?:/", name):
        raise UserError(f"{name} is an address: download the model's files into a folder, and name that")
    if name in presets():
        raise UserError(f"{name} is a published release, and there is no folder {name}: download its files into one")
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not folder.parent.exists():
        raise UserError(
            f"there is no folder {name}: {ours}, or, if this is a name on the Hugging Face hub, download it first with "
            f"hf download {name} --local-dir {folder.name}"
        )
    raise UserError(f"there is no folder {name}: {ours}")


def load_model(
    folder: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    allow_nonfinite: bool = False,
) -> tuple[Decoder, dict[str, Any]]:
    """The decoder in a folder, in its files' precision (bf16 where they are quantized) unless `dtype` is given, and
    its config.json.

    Weights are mapped into memory where they can stay as they are; writing to them never reaches the files. Those that
    are not finite are a UserError unless `allow_nonfinite`.
    """
    hf = read_config(folder)
    stored = dequantized(hf, stored_tensors(folder))
    kind, config, model = outline(hf, stored)
    wanted = dict(model.named_parameters())  # a tied head is not among them
    where = torch.device(device or "cpu")
    ours = to_ours(kind, config, stored, wanted, dtype=dtype, device=where, allow_nonfinite=allow_nonfinite)
    model.load_state_dict(ours, strict=False, assign=True)
    if config.tied:
        model.head.weight = model.embed.weight
    return model.eval(), hf


def outline(hf: HF, stored: Mapping[str, Stored]) -> tuple[Any, DecoderConfig, Decoder]:
    """The family, the decoder as a value and, on the meta device, as a module.

    A UserError if the files hold far less than that; it is noticed before anything large is made.
    """
    tables = [hf, *(value for value in hf.values() if isinstance(value, dict))]
    depths = [table[key] for table in tables for key in DEPTHS if isinstance(table.get(key), int | float)]
    check_depth(max(depths, default=0), stored)  # before a family counts up to it
    kind, config = read(hf)
    check_depth(config.n_layers, stored)
    try:
        with torch.device("meta"), Outline(sum(math.prod(tensor.shape) for tensor in stored.values())):
            model = Decoder(config)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise UserError(f"config.json asks for sizes that no tensor can have ({str(error).splitlines()[0]})") from None
    return kind, config, model


def check_depth(layers: float, stored: Mapping[str, Stored]) -> None:
    """A UserError if there are not even as many tensors as layers."""
    if layers > len(stored):
        raise UserError(f"config.json asks for {layers} layers, and the files hold only {len(stored)} tensors")


def save_model(model: Decoder, folder: Path, extra: HF | None = None, shard_bytes: float = math.inf) -> None:
    """Write config.json and the weights of a model, see `save_weights`."""
    save_weights(model.config, dict(model.named_parameters()), folder, extra or {}, shard_bytes)


def save_weights(
    config: DecoderConfig, ours: Mapping[str, Tensor], folder: Path, extra: HF, shard_bytes: float = math.inf
) -> None:
    """Write config.json and the weights by our names, as shards where they exceed `shard_bytes`.

    All is written beside and flushed before anything is put in place. `extra` are keys for config.json besides those
    of the architecture (token ids, say); a config.json that was loaded is kept where it still says what the model is.
    """
    hf = describe(config, extra)
    kind = family(hf["model_type"])
    dtype = str(ours["embed.weight"].dtype).removeprefix("torch.")
    hf |= {key: dtype for key in ("dtype", "torch_dtype") if key == "dtype" or key in hf}
    meta = {name: tensor.to("meta") for name, tensor in ours.items()}
    outlines = dict(to_theirs(kind, config, meta))
    files = split(outlines, shard_bytes)
    texts = {"config.json": hf}
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        texts[INDEX] = {"metadata": {"total_size": sum(t.nbytes for t in outlines.values())}, "weight_map": places}
    with ExitStack() as stack:  # what is entered first is put in place last
        beside = {name: stack.enter_context(written_whole(folder / name)) for name in (*texts, *files)}
        tensors = to_theirs(kind, config, ours)
        for file, names in files.items():
            fill(beside[file], {name: outlines[name] for name in names}, islice(tensors, len(names)))
        for name, value in texts.items():
            beside[name].write_text(json.dumps(value, indent=2) + "\n")
        for new in beside.values():
            flush(new)
        place = folder / "config.json"
        told = place.exists() and place.read_bytes() == beside[place.name].read_bytes()
        stale = [old for old in folder.iterdir() if re.fullmatch(OURS, old.name) and old.name not in beside]
        if stale or len(files) > 1 or not told:
            place.unlink(missing_ok=True)  # without it, no mixture of old and new files loads
            for old in stale:
                old.unlink()


def describe(config: DecoderConfig, original: HF) -> dict[str, Any]:
    """The config.json of a decoder: the original where it still says the same, else with its family's keys for this
    decoder, else in the words of the first family that has them, with the original's token ids."""
    original = {key: value for key, value in original.items() if key != "quantization_config"}
    unpadded = {"pad_token_id": None}  # what a family takes by default may lie beyond this vocabulary
    if "model_type" not in original:
        return unpadded | original | express(config)
    if read(original)[1] == config:
        return original
    changed = keys_of(family(original["model_type"]), config, original)
    if changed is not None:
        return changed
    ids = {key: value for key, value in original.items() if key.endswith("_token_id")}
    return unpadded | ids | express(config)
