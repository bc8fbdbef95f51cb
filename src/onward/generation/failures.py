"""Errors of requests whose logits are NaN or allow no token.

Shapes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.model.decoder import Decoder
from onward.tracing.names import activation_names
from onward.tracing.trace import trace

NOTHING_ALLOWED = "no token may come next: the constraint, bans and processors of this request exclude every token"


class NotANumber(Exception):
    """The placeholder for the error of a request whose logits are NaN; `nan_error` later makes the UserError that names
    the activation."""


def no_distribution_error(logits: Tensor, contexts: Sequence[Sequence[int]], model: Decoder) -> UserError:
    """Return the error for logits (N, V) with a row that is NaN or allows no token. `contexts` are the tokens before
    each row; for NaN, the model is run again on these to find the first activation with NaN."""
    nan = logits.isnan().any(-1)
    return nan_error(model, contexts[int(nan.int().argmax())]) if bool(nan.any()) else UserError(NOTHING_ALLOWED)


def nan_error(model: Decoder, tokens: Sequence[int]) -> UserError:
    """Run the model on `tokens`, and return an error that names the first activation with NaN."""
    name = first_nan(model, torch.tensor([list(tokens)], device=model.device))
    return UserError(f"the logits are NaN: the first NaN is in {name}")


def first_nan(model: Decoder, tokens: Tensor) -> str:
    """Run a decoder on token ids; return the name of its first activation with NaN, or a phrase if none has it."""
    names: list[str] = []

    def note(name: str, activation: Tensor) -> None:
        if not names and bool(activation.isnan().any()):
            names.append(name)

    large = "scores", "attn.weights"  # not traced: NaN in them also reaches the heads' output
    with trace(model, *(name for name in activation_names(model) if not name.endswith(large)), keep=note):
        model(tokens)
    return names[0] if names else "a call that could not be reproduced"
