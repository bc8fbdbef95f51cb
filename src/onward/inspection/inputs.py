"""Helpers of the functions in this folder: a text as token ids (1, T), checked indices, and a model with frozen
weights.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.model.decoder import Decoder, without_dropout
from onward.tracing.names import activation_names


def as_row(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """Token ids (1, T) on the model's device. Raises a UserError if the text is empty or longer than the context."""
    length = model.config.context_length
    if not len(tokens):
        raise UserError("the text has no tokens: give at least one")
    if len(tokens) > length:
        raise UserError(f"Cannot read a text of {len(tokens)} tokens with a context of {length}: shorten it")
    return torch.tensor([list(tokens)], device=model.device)


@torch.inference_mode()
def logits(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits (T, V) of a text, without dropout."""
    with without_dropout(model):
        return model(as_row(model, tokens))[0]


def exact(x: Tensor) -> Tensor:
    """The tensor in fp32, unless its dtype is at least as precise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention_weights_of(model: Decoder) -> list[str | None]:
    """The name of the attention weights of each layer; None for a layer that has none, such as a recurrent one."""
    known = activation_names(model)
    names = [f"blocks.{layer}.attn.weights" for layer in range(model.config.n_layers)]
    return [name if name in known else None for name in names]


def check_position(position: int, tokens: Sequence[int]) -> int:
    """The index of a position, which may count from the end. Raises a UserError outside the text."""
    if not -len(tokens) <= position < len(tokens):
        raise UserError(f"position {position} is not in the text, which has tokens 0 to {len(tokens) - 1}")
    return position % len(tokens)


def check_layer(layer: int, model: Decoder) -> int:
    return check_index(layer, model.config.n_layers, "layer")


def check_index(index: int, count: int, name: str) -> int:
    """The index of a layer or head, which may count from the end; error messages call it `name`."""
    if not -count <= index < count:
        raise UserError(f"{name} {index} does not exist: the model has {name}s 0 to {count - 1}")
    return index % count


@contextmanager
def frozen(model: Decoder) -> Iterator[None]:
    """Disable gradients of the model's parameters inside the `with` block."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
