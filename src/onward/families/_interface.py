"""The interface of a family file, as types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from onward.config.decoder import DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor

HF = Mapping[str, Any]  # a config.json
# functions from the file's values to Onward's, and back
Fix = tuple["Callable[[Tensor], Tensor]", "Callable[[Tensor], Tensor]"]
Row = tuple[str | list[str], str | list[str]] | tuple[str | list[str], str | list[str], Fix]


class Names(Protocol):
    """The mapping between tensor names in files of a format and parameter names in Onward's Decoder."""

    @property
    def BASE(self) -> str:
        """A prefix of tensor names that some files leave out, such as "model."; "" for none."""

    @property
    def IGNORED(self) -> str:
        """A regular expression for tensors to ignore, such as stored masks; "" for none."""

    def names(self, config: DecoderConfig) -> Iterator[Row]:
        """Rows of the mapping: (name in files, name in Onward), optionally with a pair of functions that convert values
        to Onward's and back. A name may be a list of tensors that are fused or stacked into one."""


class Family(Names, Protocol):
    """A family of published decoders, such as Llama: a module that translates between config.json and DecoderConfig."""

    ARCHITECTURES: dict[str, str]  # model_type -> class name in transformers
    PRESETS: dict[str, HF | DecoderConfig]  # config of each release, by name
    ANCESTORS: dict[str, str]  # prefix of a release's name -> the preset that it derives from

    def config(self, hf: HF) -> DecoderConfig:
        """The decoder that a config.json describes; missing keys have the defaults of transformers."""

    def to_hf(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of a config.json that describes a decoder; raises Inexpressible if the family cannot describe it."""
