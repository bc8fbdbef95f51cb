"""torch.compile for the blocks of a decoder."""

from functools import partial
from typing import Any

import torch

from onward.model.decoder import Decoder
from onward.model.experts import ExpertsModule


def compile_blocks(model: Decoder, **options: Any) -> None:
    """Compile every block of a model with torch.compile and these `options`, in place; the compilation happens at the
    next call.

    Experts run uncompiled, since the number of tokens per expert depends on the data. Call this once per model, before
    `recompute_blocks`.
    """
    for module in model.modules():  # functions are bound by `partial`, so that a copy of the model calls its own
        if isinstance(module, ExpertsModule):
            module.mix = partial(torch.compiler.disable(type(module).mix), module)  # type: ignore[method-assign]
    for block in model.blocks:
        method: Any = block.forward
        block.forward = partial(torch.compile(method.__func__, **options), block)  # type: ignore[method-assign]
