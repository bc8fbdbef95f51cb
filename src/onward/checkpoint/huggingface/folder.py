"""A model in a Hugging Face folder: config.json, and its weights as one safetensors file or as shards with an index."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onward.base.errors import UserError
from onward.base.files import read_json
from onward.checkpoint.huggingface.quantized import dequantized
from onward.checkpoint.huggingface.text_part import text_tensors
from onward.checkpoint.huggingface.tied import head_differs, with_embedding
from onward.checkpoint.names import LeftOut
from onward.checkpoint.source import ModelSource, Outline, allocated
from onward.checkpoint.weights import StoredTensor, refuse_pickles, stored_tensors
from onward.config.decoder import DecoderConfig
from onward.families import Family, read, text_part
from onward.hub.folder import is_adapter
from onward.text.tokenizer import Tokenizer, tokenizer_file

DEPTHS = "num_hidden_layers", "n_layers", "n_layer", "num_layers"  # names of the number of layers in config.json


class ModelFolder(ModelSource):
    def outline(self) -> Outline:
        """The decoder without weights, and its tensors; quantized formats that Onward cannot compute with are
        dequantized when read. Refuses files with far fewer parameters than config.json asks for, before anything large
        is allocated."""
        hf, stored = read_config(self.path), stored_tensors(self.path)
        part = text_part(hf)
        stored = dequantized(part.keys if part else hf, stored)  # before stacked experts are divided
        if part:
            stored = text_tensors(part, stored)
            hf = {"tie_word_embeddings": not any(name.startswith("lm_head.") for name in stored)} | part.keys
        tables = [hf, *(value for value in hf.values() if isinstance(value, dict))]
        depths = [table[key] for table in tables for key in DEPTHS if isinstance(table.get(key), int | float)]
        check_depth(max(depths, default=0), stored)  # before a family loops over the layers
        kind, config = read(hf, str(self.path / "config.json"))
        check_depth(config.n_layers, stored)
        if part:
            hf["architectures"] = [kind.ARCHITECTURES[hf["model_type"]]]
            message = f"Only the text decoder of {self.path} is loaded: its encoders of images or sound are left out"
            warnings.warn(LeftOut(message), stacklevel=2)
        model = allocated(config, stored)
        if config.tied:
            stored = with_embedding(kind, config, stored)
            if head_differs(kind, config, stored):
                config = replace(config, tied=False)
                model = allocated(config, stored)
        return Outline(hf, kind, config, stored, model)

    def family(self) -> tuple[Family, DecoderConfig]:
        return read(read_config(self.path))

    def stored(self) -> dict[str, StoredTensor]:
        part, stored = text_part(read_config(self.path)), stored_tensors(self.path)
        return text_tensors(part, stored) if part else stored

    def tensor_types(self) -> list[str]:
        return [tensor.dtype for tensor in self.stored().values()]

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.load(self.path) if tokenizer_file(self.path) else None

    def required_tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path)


def read_config(folder: Path) -> dict[str, Any]:
    refuse_pickles(folder)
    if folder.is_dir():
        if is_adapter(folder):
            raise UserError(
                f"Cannot load {folder} as a model, because it holds an adapter: make a model of it with onward merge "
                f"{folder} OUT, and name OUT"
            )
        return read_json(folder / "config.json")
    if folder.exists():
        raise UserError(f"{folder} is a file: name its folder, which holds a config.json and the weights")
    raise UserError(f"there is no folder {folder}: name the folder of a model, such as runs/mybook")


def check_depth(layers: float, stored: Mapping[str, StoredTensor]) -> None:
    if layers > len(stored):
        raise UserError(f"config.json asks for {layers} layers, but the files hold only {len(stored)} tensors")
