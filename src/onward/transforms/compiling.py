"""torch.compile for the blocks of a decoder."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from onward.model.adapters import show_to_compiled_code
from onward.model.attachments import attach
from onward.model.decoder import Decoder
from onward.model.experts import ExpertsModule


def compile_blocks(model: Decoder, **options: Any) -> None:
    """Compile every block of a model with torch.compile and these `options`, in place; compilation happens at the next
    call.

    Experts run uncompiled, since the number of tokens per expert depends on the data.
    """
    attachment = attach(model, "compilation", f"torch.compile of {len(model.blocks)} blocks")
    for module in model.modules():
        if isinstance(module, ExpertsModule):
            attachment.replace(module, "mix", torch.compiler.disable(type(module).mix))
    for block in model.blocks:
        forward: Any = type(block).forward  # the function of the class, so that it is compiled once for all its blocks
        attachment.replace(block, "forward", partial(called, torch.compile(forward, **options)))


def called(compiled: Callable[..., Any], *arguments: Any) -> Any:
    show_to_compiled_code()
    return compiled(*arguments)
