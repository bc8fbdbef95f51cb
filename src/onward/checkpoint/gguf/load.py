"""A GGUF file as a source from which a model is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from onward.checkpoint.gguf.architectures import Architecture, architecture
from onward.checkpoint.gguf.header import read_header
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.tensors import stored_tensors
from onward.checkpoint.gguf.vocabulary import read_tokenizer
from onward.checkpoint.source import ModelSource, Outline, allocated
from onward.checkpoint.weights import StoredTensor
from onward.config.decoder import DecoderConfig
from onward.families import Family, family
from onward.text.tokenizer import Tokenizer

LAYER = re.compile(r"blk\.(\d+)\.")
VECTORS = "ffn_gate_inp_shexp.weight"  # some files have a matrix of one row


class GGUFFile(ModelSource):
    """A GGUF file, or all files of a split model. Its header is read once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.header = read_header(path)

    @cached_property
    def architecture(self) -> Architecture:
        return architecture(self.header)

    def outline(self) -> Outline:
        """The outline's `hf`, in place of a config.json, contains the ids of the beginning and end tokens."""
        own, keys = Keys(self.header), self.header.keys
        config = self.architecture.config(own)
        stored = self.stored()
        own.warn()
        ids = {name: keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        hf = {f"{name}_token_id": i for name, i in ids.items() if type(i) is int and i < config.vocab_size}
        return Outline(hf, self.architecture, config, stored, allocated(config, stored))

    def family(self) -> tuple[Family, DecoderConfig]:
        return family(self.architecture.families[0]), self.architecture.config(Keys(self.header))

    def stored(self) -> dict[str, StoredTensor]:
        keys = Keys(self.header)  # Onward leaves out multi-token prediction layers, which are last
        layers = keys.number("block_count") - keys.number("nextn_predict_layers", 0)
        tensors = {
            name: replace(info, shape=info.shape[1:]) if name.endswith(VECTORS) and info.shape[:-1] == (1,) else info
            for name, info in self.header.tensors.items()
            if not (match := LAYER.match(name)) or int(match[1]) < layers or layers == keys.number("block_count")
        }
        result = self.architecture.stored(stored_tensors(tensors, self.architecture.shift_of))
        for name, value in self.architecture.numbers(keys).items():
            rows = lambda start, end, value=value: torch.tensor([value])[start:end]
            result[name] = StoredTensor([1], next(iter(result.values())).dtype, rows)
        return result

    def tensor_types(self) -> list[str]:
        return [info.type.name for info in self.header.tensors.values()]

    def tokenizer(self) -> Tokenizer | None:
        return read_tokenizer(self.header)
