"""Edits: activations of a model are changed while it runs.

Shapes: B batch, T tokens in this call, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from onward.arguments import checked
from onward.errors import UserError
from onward.model.decoder import Decoder, described
from onward.tracing.names import listening, resolve, taps_of
from onward.tracing.taps import Taps

Change = Callable[[Tensor], Tensor] | Tensor | float
Tokens = slice | int | list[int] | None  # indices of the tokens of a call; None: all


def zero(x: Tensor) -> Tensor:
    """Zeros in place of the activation (ablation)."""
    return torch.zeros_like(x)


def mean(x: Tensor) -> Tensor:
    """The mean over the sequences and tokens of the call in place of each vector (mean ablation)."""
    return x.mean((0, 1), keepdim=True).expand_as(x)


def add(vector: Tensor | float, at: Tokens = None) -> Callable[[Tensor], Tensor]:
    """Add a vector that broadcasts to the activation (B, T, ...), at some of the tokens or at all (steering)."""
    return changed(lambda x: x + as_like(vector, x), at)


def scale(factor: float, at: Tokens = None) -> Callable[[Tensor], Tensor]:
    """Multiply the activation by a factor."""
    return changed(lambda x: x * factor, at)


def clamp(least: float | None = None, most: float | None = None, at: Tokens = None) -> Callable[[Tensor], Tensor]:
    """Limit each number of the activation."""
    return changed(lambda x: x.clamp(least, most), at)


def replace(value: Tensor | float, at: Tokens = None) -> Callable[[Tensor], Tensor]:
    """A value in place of the activation, such as that of another run (activation patching)."""

    def replaced(x: Tensor) -> Tensor:
        new = as_like(value, x)
        try:
            return new.expand_as(x)
        except RuntimeError:
            raise UserError(f"the value is {described(new)}, which does not fit {described(x)}") from None

    return changed(replaced, at)


def as_like(value: Tensor | float, x: Tensor) -> Tensor:
    """A tensor or a number in the dtype and on the device of x."""
    return torch.as_tensor(value, dtype=x.dtype, device=x.device)


def changed(change: Callable[[Tensor], Tensor], at: Tokens) -> Callable[[Tensor], Tensor]:
    """A change of the tokens `at` alone of an activation (B, T, ...)."""
    if at is None:
        return change
    tokens = [at] if isinstance(at, int) else at

    def function(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, tokens] = change(x)[:, tokens]
        return y

    return function


class Edit:
    """The changes of a model's activations inside one `with` block."""

    gradients, edits = False, True

    def __init__(self, taps: Taps, changes: Mapping[str, Change]) -> None:
        self.wanted: dict[str, set[int | None]] = {}
        self.changes: dict[tuple[str, int | None], list[tuple[str, Callable[[Tensor], Tensor]]]] = {}
        for pattern, change in changes.items():
            function = change if callable(change) else replace(change)
            for name, indices in resolve(taps.activations, [pattern]).items():
                if not taps.activations[name].editable:
                    raise UserError(f"{name} is computed from other activations: edit those that it is made of")
                self.wanted.setdefault(name, set()).update(indices)
                for index in indices:
                    self.changes.setdefault((name, index), []).append((pattern, function))

    def begin(self) -> None:
        pass

    def locate(self, positions: Tensor) -> None:
        pass

    def visit(self, name: str, index: int | None, value: Tensor) -> Tensor:
        for pattern, change in self.changes[name, index]:
            try:
                new = change(value)
            except (RuntimeError, IndexError, UserError) as error:
                raise UserError(f"the edit of {pattern} failed on {described(value)}: {error}") from error
            if not isinstance(new, Tensor) or new.shape != value.shape:
                raise UserError(f"the edit of {pattern} gives {described(new)} in place of {described(value)}")
            value = new.to(value.dtype)
        return value


@checked
@contextmanager
def edit(model: Decoder, changes: Mapping[str, Change]) -> Iterator[None]:
    """Change activations of a model while it runs inside the `with` block.

    >>> with onward.edit(model, {"blocks.5.attn.heads.2": zero, "blocks.7": add(vector)}):
    ...     model(tokens)

    The keys are names and patterns as of `trace`. A value is a function from the activation to one of the same shape,
    such as those of this module (zero, mean, add, scale, clamp, replace), or a tensor or number that replaces it.
    Edits of the same activation follow each other in the order in which they began. Generation and training go through
    edits too. Afterwards, also after an exception, the model is as it was.
    """
    taps = taps_of(model)
    with listening(taps, Edit(taps, changes)):
        yield
