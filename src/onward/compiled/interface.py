"""The interface of compiled decoding steps: a Program on a CPU (`program.py`), CUDA graphs on CUDA (`graphs.py`).

Shapes: B rows, T tokens per row (more than one in a prompt, or when draft tokens are verified), D d_model, V
vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from onward.model.cache import CacheView, KVCache
from onward.model.decoder import Decoder

StepShape = tuple[int, int]  # (B, T)
Step = Callable[[Decoder, Tensor, Tensor, CacheView], Any]  # the function to compile


class NotCompilable(Exception):
    """Raised if a decoding step cannot be compiled; the message names the operation or the reason."""


class TooManyRows(NotCompilable):
    """Raised if a decoding step cannot be compiled for this many rows; fewer rows of the same model may be possible."""


class CompiledStep(ABC):
    """A compiled decoding step: the forward pass of a model for the next tokens of rows of a KV cache.

    It owns the memory of its tokens, positions and results, so only one runner at a time can use it.
    """

    @classmethod
    @abstractmethod
    def compile(cls, model: Decoder, cache: KVCache, shape: StepShape, step: Step) -> Self:
        """Compile a decoding step, the function `step`, while requests are running, between two uncompiled steps;
        `shape` is (rows, tokens per row). Raises NotCompilable if the model, the cache or this machine does not allow
        it."""

    @classmethod
    @abstractmethod
    def compile_ahead(cls, model: Decoder, cache: KVCache, shape: StepShape, step: Step, folder: Path | None) -> Self:
        """Compile a decoding step before the first request, which may take longer than `compile` and needs empty rows;
        `folder` keeps the code for the next start. Other arguments and errors are those of `compile`."""

    @abstractmethod
    def run(self, tokens: Tensor, positions: Tensor, cache: KVCache, length: int, first: int = 0) -> Tensor:
        """Run the compiled step: compute its result, such as logits (B, T, V), for tokens (B, T) at positions (B, T),
        all below `length`, over the rows of the cache from row `first` on; the next run overwrites the result. Raises
        NotCompilable for a cache of another layout."""


def decoding_step(model: Decoder, tokens: Tensor, positions: Tensor, view: CacheView) -> Tensor:
    """Run the model without checks: return the logits (B, T, V) for tokens (B, T) at positions (B, T), over the cache
    rows in `view`. This is the function that is compiled."""
    return model.logits(model.hidden_of_checked(tokens, positions, view))


def hidden_step(model: Decoder, tokens: Tensor, positions: Tensor, view: CacheView) -> Tensor:
    """Run the model without checks: return the hidden states (B, T, D) for tokens (B, T) at positions (B, T), over the
    cache rows in `view`. This function is compiled for short prompts and for drafts that continue hidden states."""
    return model.hidden_of_checked(tokens, positions, view)
