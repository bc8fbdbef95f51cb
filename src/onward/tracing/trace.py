"""Traces: record the activations of a model by name while it runs.

Shapes: B batch, T tokens in this call, S keys, N tokens with logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.model.decoder import Decoder
from onward.model.rows import ROWS, Row
from onward.tracing.calls import Forward, Location
from onward.tracing.hooks import Traceable
from onward.tracing.listening import listening
from onward.tracing.names import full_name, resolve
from onward.tracing.sites import activations


@dataclass(eq=False)
class TracedCall:
    """The recorded activations of one call of a traced model; `call["blocks.3.out"]` is one of them, by name."""

    rows: tuple[Row, ...] = ()  # the request of each row; () unless an engine calls the model
    positions: Tensor | None = None  # (B or 1, T), position of each token in its text
    activations: dict[str, Tensor] = field(default_factory=dict)
    logit_rows: tuple[Row, ...] = ()  # the request of each row of logits
    retained: dict[str, Callable[[], Tensor | None]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return recorded_activation(self.activations, name)

    def __contains__(self, name: str) -> bool:
        return full_name(name) in self.activations

    def __iter__(self) -> Iterator[str]:
        return iter(self.activations)

    def grad(self, name: str) -> Tensor:
        """Return the gradient of the activation `name` in this call, in its shape, after `backward`. Raises a UserError
        if it has none."""
        gradient = self.retained[full_name(name)]() if full_name(name) in self.retained else None
        if gradient is None:
            raise UserError(
                f"{name} has no gradient: trace with gradients=True and call backward; scales, choices, and keys and "
                "values computed from latents have none"
            )
        return gradient


def recorded_activation(activations: dict[str, Tensor], name: str) -> Tensor:
    name = full_name(name)
    if name not in activations:
        names = ", ".join([*activations][:6]) + (", ..." if len(activations) > 6 else "")
        raise UserError(f"{name} was not traced: this trace has {names or 'nothing, because the model was not called'}")
    return activations[name]


class Trace:
    """The activations of a model, recorded call by call by the function `trace`; if there was exactly one call,
    `t["blocks.3.out"]` is an activation of that call. `for name in t` goes through all names."""

    edits = False

    def __init__(
        self,
        known: Mapping[str, Traceable],
        patterns: Sequence[str],
        gradients: bool,
        keep: Callable[[str, Tensor], Any] | None,
    ) -> None:
        self.known, self.wanted = known, resolve(known, patterns or ["*"])
        self.gradients, self.keep = gradients, keep
        self.calls: list[TracedCall] = []
        self.of_forward: dict[Forward, TracedCall] = {}

    def begin(self, forward: Forward) -> None:
        call = self.call_of(forward)
        call.rows, call.positions = ROWS.get(), forward.positions

    def call_of(self, forward: Forward) -> TracedCall:
        if forward not in self.of_forward:
            self.of_forward[forward] = TracedCall()
            self.calls.append(self.of_forward[forward])
        return self.of_forward[forward]

    def visit(self, index: int | None, value: Tensor, location: Location) -> Tensor:
        name, call = location.name, self.call_of(location.forward)
        axis, key = self.known[name].axis, name if index is None else f"{name}.{index}"
        kept = value
        if self.gradients:  # the complete activation is in the graph of the loss; a part selected from it is not
            if value.requires_grad:
                value.retain_grad()
            keeps_all = index is None or axis is None or value.ndim < len(self.known[name].shape)
            select = (lambda t: t) if keeps_all else lambda t: t.select(axis, index)
            kept = select(value)
            call.retained[key] = lambda: None if value.grad is None else select(value.grad)
        elif index is not None:
            kept = value.clone()  # a copy, so that the whole activation can be freed
        kept = kept if self.gradients else kept.detach()
        if name == "logits":
            call.logit_rows += ROWS.get()
        if self.keep is not None:
            kept = self.keep(key, kept)
        if name == "logits" and key in call.activations:  # logits of a later chunk of the loss
            return value
        call.activations[key] = kept
        return value

    @property
    def call(self) -> TracedCall:
        """The record of the only call of the model. Raises a UserError unless there was exactly one call."""
        if len(self.calls) != 1:
            raise UserError(
                f"the model was called {len(self.calls)} times: name the call, as in trace.calls[-1]"
                if self.calls
                else "the model was not called inside the with block: call it there"
            )
        return self.calls[0]

    def __getitem__(self, name: str) -> Tensor:
        return self.call[name]

    def __contains__(self, name: str) -> bool:
        return bool(self.calls) and name in self.call

    def __iter__(self) -> Iterator[str]:
        return iter(self.call)

    def grad(self, name: str) -> Tensor:
        """Return the gradient of the activation `name` in the only call of the model, after `backward`. Raises a
        UserError if it has none."""
        return self.call.grad(name)

    def of(self, request: object) -> list[dict[str, Tensor]]:
        """Return the activations of one engine request (a `Request`), as a dict {name: tensor} for each call of the
        model that has tokens of the request. The batch dimension and padding are removed: T counts only tokens of the
        request."""
        result = []
        for call in self.calls:
            for index, row in enumerate(call.rows):
                if row.request is request:
                    result.append({name: self.part(call, name, index, row) for name in call.activations})
        return result

    def part(self, call: TracedCall, name: str, index: int, row: Row) -> Tensor:
        """The part of an activation that belongs to the tokens of the request in this row, without batch dimension and
        padding."""
        value = call.activations[name]
        if name == "logits":
            rows = [*call.logit_rows]
            start = next((sum(r.tokens for r in rows[:i]) for i, r in enumerate(rows) if r.request is row.request), 0)
            count = next((r.tokens for r in rows if r.request is row.request), 0)
            return value[0, start : start + count]
        shape = self.shape_of(name)
        return value[index if len(value) > 1 else 0].narrow(shape.index("T") - 1, 0, row.tokens)

    def mean(self, name: str, index: int | None = None) -> Tensor:
        """Return the mean of the recorded activation `name` (B, T, ...), or of only its head, unit or expert `index`,
        over all tokens of all calls, in at least fp32. For the output of an expert, it is the mean over the tokens that
        use the expert. Raises a UserError for an activation without tokens, or if the trace was made with `keep`."""
        known, key = self.known[name], name if index is None else f"{name}.{index}"
        if known.shape[:2] != ("B", "T") or self.keep is not None:
            why = f"it is {known}" if self.keep is None else "the trace was made with keep"
            raise UserError(f"Cannot average {key} over tokens, because {why}: trace an activation (B, T, ...) whole")
        total, count = torch.zeros(()), 0
        for call in self.calls:
            from_all = key not in call.activations and not name.endswith(".experts")
            one = name if from_all else key
            if one not in call.activations:
                continue
            rows = [self.part(call, one, i, row) for i, row in enumerate(call.rows)] or [*call.activations[one]]
            for x in rows:  # (T, ...)
                x = x.select(known.axis - 1, index) if from_all and index is not None and known.axis is not None else x
                x = x.to(torch.promote_types(x.dtype, torch.float32))
                x = x[x.any(-1)] if index is not None and name.endswith(".experts") else x
                total, count = total.to(x.device) + x.sum(0), count + len(x)
        if not count:
            recorded_activation(self.calls[0].activations if self.calls else {}, key)
            raise UserError(f"{key} has no tokens in this trace: trace a text with tokens for it")
        return total / count

    def shape_of(self, key: str) -> tuple[str | int, ...]:
        if key in self.known:
            return self.known[key].shape
        base, _, index = key.rpartition(".")
        return self.known[base].shape_of(int(index))


@checked
@contextmanager
def trace(
    model: Decoder,
    *patterns: str,
    gradients: bool = False,
    keep: Callable[[str, Tensor], Any] | None = None,
) -> Iterator[Trace]:
    """Record activations of a model while it runs inside the `with` block.

    >>> with onward.trace(model, "blocks.*.attn.weights", "blocks.3.out") as t:
    ...     model(tokens)
    >>> t["blocks.3.attn.weights"]  # (B, H, T, S)

    `patterns` are names from `activation_names`, with `*` for any characters; by default all. A number after the name
    of an activation with heads, units or experts selects one. Only matching activations are kept.

    `t.calls` lists the calls of the model with their positions; `t.of(request)` returns the activations of one request
    of an engine. The outputs are bit-for-bit those of the uncompiled model. With `gradients`, `t.grad(name)` is the
    gradient after a backward pass. `keep(name, tensor)` returns the value to keep in place of the tensor, such as
    `tensor.cpu()` or a statistic. A trace records activations after edits, and only the calls of its own thread or
    asyncio task.
    """
    recorded = Trace(activations(model), patterns, gradients, keep)
    with listening(model, recorded):
        yield recorded
