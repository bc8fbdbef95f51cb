"""The interface of a stored model in any format."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onward.base.errors import UserError
from onward.checkpoint.weights import StoredTensor
from onward.config.decoder import DecoderConfig
from onward.families import Family, Names
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Outline:
    """A stored model of which only the headers have been read."""

    hf: dict[str, Any]  # the model's config.json; for a GGUF file, the equivalent keys
    names: Names  # tensor names in the files, with the parameter names in the decoder
    config: DecoderConfig
    stored: Mapping[str, StoredTensor]
    model: Decoder  # the model on the meta device


class ModelSource(ABC):
    """A stored model: `huggingface.folder.ModelFolder` or `gguf.load.GGUFFile`; see `load.open_source`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def outline(self) -> Outline: ...

    @abstractmethod
    def family(self) -> tuple[Family, DecoderConfig]:
        """The family and config of the model; reads no weights."""

    @abstractmethod
    def stored(self) -> Mapping[str, StoredTensor]:
        """Tensors on disk; a quantized weight may be stored as more than one tensor."""

    @abstractmethod
    def tensor_types(self) -> list[str]:
        """The type of each stored tensor by its name in the format, such as BF16 or Q4_0."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None: ...

    def required_tokenizer(self) -> Tokenizer:
        if (tokenizer := self.tokenizer()) is None:
            raise UserError(f"{self.path} has no tokenizer: name a file or folder that holds one")
        return tokenizer


ALLOCATIONS = torch.empty, torch.full, torch.ones, torch.zeros


class SizeLimit(TorchFunctionMode):
    """Refuses modules that allocate far more than `elements` on the meta device, as protection against absurd sizes in
    a config.json. Also skips the initialization of weights, whose imports take a second."""

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
            raise UserError(
                f"config.json or options ask for sizes that no tensor can have ({reason}): reduce them"
            ) from None
        self.allocated += result.numel()
        if self.allocated > 4 * self.elements:  # smaller differences are reported with a tensor's name
            raise UserError(
                f"config.json asks for far more parameters than the {self.elements:,} in the files: download both again"
            )
        return result


def allocated(config: DecoderConfig, stored: Mapping[str, StoredTensor]) -> Decoder:
    """The Decoder on the meta device, if it does not have far more elements than `stored`."""
    with torch.device("meta"), SizeLimit(sum(math.prod(tensor.shape) for tensor in stored.values())):
        return Decoder(config)
