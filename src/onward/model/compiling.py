"""Compiling a finished decoder, block by block."""

from typing import Any

import torch

from onward.model.decoder import Decoder
from onward.model.experts import ExpertsModule


def compile_blocks(model: Decoder, **options: Any) -> None:
    """Compile every block with torch.compile and its `options`; they run compiled from their next call on.

    Experts stay as they are written: how many tokens each of them gets is known at run time only.
    """
    for module in model.modules():
        if isinstance(module, ExpertsModule):
            module.mix = torch.compiler.disable(module.mix)  # type: ignore[method-assign]
    for block in model.blocks:
        block.compile(**options)
