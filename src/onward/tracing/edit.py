"""Edits: changes of a model's activations while it runs.

Shapes: B batch, T tokens in this call, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.model.decoder import Decoder, described, without_dropout
from onward.model.rows import ROWS
from onward.tracing.calls import Forward, Location
from onward.tracing.hooks import Traceable
from onward.tracing.listening import listening
from onward.tracing.names import resolve
from onward.tracing.sites import activations
from onward.tracing.trace import Trace, trace

Positions = slice | int | Sequence[int] | None  # token positions in the text (prompt and answer), from 0; None: all
Data = Tensor | Sequence[Sequence[int]]  # token ids (B, T), or one sequence of token ids per text


@dataclass(frozen=True, eq=False)
class Change:
    """A change of one activation for `edit`: `function` maps the activation and its Location (name, dimensions and
    token positions) to the new value, at all positions of the text or only at the positions `at`: an index, a sequence
    of indices, or a slice.

    Positions count from the start of the text, not of the call, so an edit has the same effect in generation with a
    cache as in one call on the whole text. Scores and weights of masked keys are not changed.
    """

    function: Callable[[Tensor, Location], Tensor]
    at: Positions = None

    def __post_init__(self) -> None:
        at = self.at
        numbers = [at.start or 0, at.stop or 0] if isinstance(at, slice) else [at] if isinstance(at, int) else at or []
        if any(position < 0 for position in numbers) or (isinstance(at, slice) and (at.step or 1) < 1):
            raise UserError(f"Cannot change positions at {at}: count up from 0, the first token of a text")

    def __call__(self, x: Tensor, location: Location) -> Tensor:
        new = self.function(x, location).to(x.dtype)
        for chosen in self.chosen(x, location), location.visible(x):
            new = new if chosen is None else torch.where(chosen, new, x)
        return new

    def chosen(self, x: Tensor, location: Location) -> Tensor | None:
        """True at the tokens in `at`, in a shape that broadcasts to `x`; None for all tokens."""
        if self.at is None:
            return None
        positions = location.along("T", x)
        if not isinstance(self.at, slice):
            numbers = [self.at] if isinstance(self.at, int) else list(self.at)
            return torch.isin(positions, torch.tensor(numbers, dtype=positions.dtype, device=positions.device))
        start, stop, step = self.at.start or 0, self.at.stop, self.at.step or 1
        mask = (positions >= start) & ((positions - start) % step == 0)
        return mask if stop is None else mask & (positions < stop)


@dataclass(frozen=True, eq=False)
class Mean:
    """A change for `edit` that replaces activations by their mean over the tokens of a trace or of texts; `mean_of`
    makes it."""

    source: Trace | Data

    def changes(self, model: Decoder, wanted: Mapping[str, set[int | None]]) -> dict[tuple[str, int | None], Change]:
        """Return, for each wanted activation (name, index), the change that replaces it by its mean; index None: the
        whole activation."""
        chosen = [(name, index) for name, indices in wanted.items() for index in indices]
        source = self.source
        if not isinstance(source, Trace):
            source = traced(model, source, [name if index is None else f"{name}.{index}" for name, index in chosen])
        return {one: replace(source.mean(*one)) for one in chosen}


@torch.no_grad()
def traced(model: Decoder, data: Data, names: Sequence[str]) -> Trace:
    batches = [data] if isinstance(data, Tensor) else [torch.tensor([list(text)]) for text in data]
    with without_dropout(model), trace(model, *names) as recorded:
        for batch in batches:
            model(batch.to(model.device))
    return recorded


def mean_of(source: Trace | Data) -> Mean:
    """Return a change for `edit` that replaces each vector of an activation by the mean of the activation over the
    tokens of a trace, or of texts (mean ablation). The texts are token ids (B, T) or a list of lists of ids; the model
    runs on them when the edit begins."""
    return Mean(source)


def add(vector: Tensor | float, at: Positions = None) -> Change:
    """Return a change for `edit` that adds a vector, which broadcasts to the activation (B, T, ...), at the positions
    `at` of the text, by default all (steering).

    If the vector has more than one token or key, its entry p is added at position p; later positions are not changed.
    """

    def added(x: Tensor, location: Location) -> Tensor:
        new, known = values_at(vector, x, location)
        return x + (new if known is None else torch.where(known, new, 0))

    return Change(added, at)


def scale(factor: float, at: Positions = None) -> Change:
    """Return a change for `edit` that multiplies an activation by `factor`, at the positions `at` of the text, by
    default all."""
    return Change(lambda x, _: x * factor, at)


def clamp(least: float | None = None, most: float | None = None, at: Positions = None) -> Change:
    """Return a change for `edit` that limits each number of an activation to the range from `least` to `most` (None: no
    limit), at the positions `at` of the text, by default all."""
    return Change(lambda x, _: x.clamp(least, most), at)


def replace(value: Tensor | float, at: Positions = None) -> Change:
    """Return a change for `edit` that replaces an activation by a value, such as that of another run, at the positions
    `at` of the text, by default all (activation patching).

    If the value has more than one token or key, its entry p replaces position p; later positions are not changed.
    """

    def replaced(x: Tensor, location: Location) -> Tensor:
        new, known = values_at(value, x, location)
        return new.expand_as(x) if known is None else torch.where(known, new, x)

    return Change(replaced, at)


zero = Change(lambda x, _: torch.zeros_like(x))  # zeros in place of the activation (ablation)


def values_at(value: Tensor | float, x: Tensor, location: Location) -> tuple[Tensor, Tensor | None]:
    """Return the entries of `value` for the token and key positions of `x`, in a shape that broadcasts to `x`, and a
    mask of the positions for which `value` has an entry (None: all)."""
    new, known = torch.as_tensor(value, dtype=x.dtype, device=x.device), None
    sizes = (1,) * (x.ndim - new.ndim) + tuple(new.shape)
    letters = location.shape[-x.ndim :]
    if len(sizes) == x.ndim and sizes[0] > 1 and ROWS.get():
        raise UserError(
            f"Cannot use the value, {described(new)}, for {sizes[0]} texts in an engine: give one value to all"
        )
    if len(sizes) > x.ndim or any(
        size not in (1, wanted) and letter not in ("T", "S") for size, wanted, letter in zip(sizes, x.shape, letters)
    ):
        raise UserError(
            f"Cannot fit the value, {described(new)}, to the activation, {described(x)}: give one that broadcasts to it"
        )
    new = new.view(sizes)
    for axis, letter in enumerate(letters):
        if letter in ("T", "S") and sizes[axis] > 1:
            positions = location.along(str(letter), x)
            inside = (positions >= 0) & (positions < sizes[axis])
            known = inside if known is None else known & inside
            new = torch.take_along_dim(new, positions.clamp(0, sizes[axis] - 1).long(), axis)
    return new, known


class Edit:
    """The changes of a model's activations inside one `with` block of `edit`; the model's hooks call `visit` with each
    activation to be changed."""

    gradients, edits = False, True

    def __init__(self, model: Decoder, changes: Mapping[str, Edited]) -> None:
        self.known: Mapping[str, Traceable] = activations(model)
        self.wanted: dict[str, set[int | None]] = {}
        self.changes: dict[tuple[str, int | None], list[tuple[str, Change | Callable[[Tensor], Tensor]]]] = {}
        for pattern, change in changes.items():
            wanted = resolve(self.known, [pattern])
            for name, indices in wanted.items():
                if not self.known[name].editable:
                    raise UserError(f"Cannot edit {name}, because it is computed from other activations: edit those")
                self.wanted.setdefault(name, set()).update(indices)
            means = change.changes(model, wanted) if isinstance(change, Mean) else {}
            for name, indices in wanted.items():
                for index in indices:
                    one = means.get((name, index), change)
                    function = one if callable(one) else replace(one)  # type: ignore[arg-type]
                    self.changes.setdefault((name, index), []).append((pattern, function))

    def begin(self, forward: Forward) -> None:
        pass

    def visit(self, index: int | None, value: Tensor, location: Location) -> Tensor:
        for pattern, change in self.changes[location.name, index]:
            try:
                new = change(value, location) if isinstance(change, Change) else change(value)
            except (RuntimeError, IndexError, UserError) as error:
                raise UserError(f"the edit of {pattern} failed on {described(value)}: {error}") from error
            if not isinstance(new, Tensor) or new.shape != value.shape:
                raise UserError(f"the edit of {pattern} returned {described(new)} instead of {described(value)}")
            value = new.to(value.dtype)
        return value


Edited = Change | Mean | Callable[[Tensor], Tensor] | Tensor | float


@checked
@contextmanager
def edit(model: Decoder, changes: Mapping[str, Edited]) -> Iterator[None]:
    """Change activations of a model while it runs inside the `with` block.

    >>> with onward.edit(model, {"blocks.5.attn.heads.2": zero, "blocks.7": add(vector)}):
    ...     model(tokens)

    Keys are names and patterns as for `trace`. A value is a change from this module (zero, mean_of, add, scale, clamp,
    replace), a tensor or number that replaces the activation, or a function from the activation to one of the same
    shape. The function receives the activation for the tokens of one call: during decoding, one token per request.

    Edits of the same activation apply in the order in which they began. They apply to generation and training too, in
    the thread or asyncio task that opened them. After the block, also after an exception, the model is unchanged.
    """
    with listening(model, Edit(model, changes)):
        yield
