"""The sizes of a DecoderConfig that its parts read. Does not import torch."""

from __future__ import annotations

from typing import Protocol


class Sizes(Protocol):
    """Protocol with the sizes of DecoderConfig, the base of `part_types.ConfigFields`."""

    @property
    def d_model(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def d_head(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def context_length(self) -> int: ...
