"""The importance of the columns of weights: the mean squares of the columns' inputs, measured on a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import Architecture
from onward.checkpoint.names import rows
from onward.checkpoint.packed import moves_rows
from onward.model.decoder import Decoder

MOST = 128  # maximum number of windows read from the text


@contextmanager
def squares(name: str, module: nn.Module, sums: dict[str, Tensor]) -> Iterator[None]:
    """Add the squares of a layer's inputs (..., D) to `sums`, under the name of its weight."""

    def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        own = inputs[0].detach().float().flatten(0, -2).square().sum(0)
        sums[name] = sums[name] + own if name in sums else own

    handle = module.register_forward_pre_hook(add)
    try:
        yield
    finally:
        handle.remove()


@torch.inference_mode()
def importance(model: Decoder, tokens: Sequence[int]) -> dict[str, Tensor]:
    """The mean squares (D,) of the inputs of each linear layer, by the name of its weight, over windows of tokens."""
    length = min(model.config.context_length, 512)
    windows = [tokens[start : start + length] for start in range(0, len(tokens), length)][:MOST]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise UserError("importance needs a text of at least two tokens: give a longer one")
    sums: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                stack.enter_context(squares(f"{name}.weight", module, sums))
        for window in windows:
            model(torch.tensor([window], device=model.embed.weight.device))
    count = sum(map(len, windows))
    return {name: (total / count).cpu() for name, total in sums.items()}


def by_their_names(kind: Architecture, model: Decoder, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `ours` by the names of the file's tensors, for tensors whose columns keep their order."""
    meta = {name: parameter.to("meta") for name, parameter in model.named_parameters()}
    return {
        their: ours[names[0]]
        for their, names, into, _ in rows(kind, model.config, meta)
        if isinstance(their, str) and names[0] in ours and moves_rows(into, sum(meta[name].size(0) for name in names))
    }
