"""The hooks on a model through which traces and edits reach its activations.

All traces and edits of a model share one `ModelHooks`. A site of `sites.py` calls `visit` with an activation: edits
change it in the order in which they began, then traces record it. A trace or an edit belongs to the context
(`contextvars`) that opened it: the hooks do nothing in calls of another thread or task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from onward.model.attachments import Attachment
from onward.model.cache import CacheView
from onward.model.decoder import Decoder
from onward.model.mask import AttentionMask
from onward.model.rows import OPEN
from onward.tracing.calls import Forward, Location

AddHooks = Callable[["ModelHooks"], None]  # adds the hooks of one activation, or of several related ones
OUTSIDE_BLOCKS = "embed", "logits"  # activations that may be computed outside a call of the model


@dataclass(frozen=True)
class Traceable:
    """An activation of a decoder that can be traced: the function that adds its hooks (`site`), its shape, and whether
    it can be edited."""

    site: AddHooks
    shape: tuple[str | int, ...]  # dimensions: B, T, S and numbers
    axis: int | None = None  # axis of heads, units or experts; a number after the name selects one of them
    count: int = 0  # number of heads, units or experts, if it differs from the axis
    editable: bool = True

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.shape))})"

    @property
    def parts(self) -> int:
        """The number of heads, units or experts that can be selected one at a time, by a number after the activation's
        name; 0 if the activation has none."""
        return 0 if self.axis is None else self.count or int(self.shape[self.axis])

    def shape_of(self, index: int | None) -> tuple[str | int, ...]:
        return self.shape if index is None else tuple(n for axis, n in enumerate(self.shape) if axis != self.axis)


class Listener(Protocol):
    """The interface of a trace or an edit of a model, which receives each wanted activation during a call of the model
    and may return a changed one."""

    known: Mapping[str, Traceable]  # activations of the model, by name
    wanted: dict[str, set[int | None]]  # names of activations; None for the whole, numbers for heads, units or experts
    gradients: bool  # whether gradients of the activations are kept
    edits: bool  # whether the listener changes activations

    def begin(self, forward: Forward) -> None:
        """Prepare for a call of the model that begins now; `forward` is the record of the call."""

    def visit(self, index: int | None, value: Tensor, location: Location) -> Tensor:
        """Record or change an activation `value`, or its head, unit or expert `index` (None: the whole activation), and
        return its new value. `location` has the name, dimensions and token positions of the activation."""


FORWARDS: ContextVar[Mapping[ModelHooks, Forward]] = ContextVar("forwards")  # the last call of each model


class ModelHooks:
    """The forward hooks on one model, and the traces and edits that receive activations from them."""

    def __init__(self, activations: Mapping[str, Traceable], attachment: Attachment) -> None:
        self.activations, self.attachment = activations, attachment
        self.listeners: list[Listener] = []  # traces and edits of all contexts

    def add_to(self, model: Decoder) -> None:
        """Add the hooks of all activations to the model. During a call, a hook acts only if a trace or an edit of this
        context (a thread or asyncio task) wants its activation."""

        def call(plain: Any, tokens: Tensor, positions: Tensor | None, view: CacheView | None) -> Tensor:
            with self.called(tokens, positions):
                return plain(tokens, positions, view)  # type: ignore[no-any-return]

        self.attachment.wrap(model, "hidden_of_checked", call)
        for site in {a.site: None for a in self.activations.values()}:
            site(self)

    def before(self, module: nn.Module, hook: Callable[[Any, Any], Any], *names: str) -> None:
        """Register the forward pre-hook `hook(module, inputs)` on a module; it is called only while one of the
        activations `names` is traced or edited."""
        self.attachment.before(module, lambda m, inputs: hook(m, inputs) if self.wants(*names) else None)

    def after(self, module: nn.Module, hook: Callable[[Any, Any, Any], Any], *names: str) -> None:
        """Register the forward hook `hook(module, inputs, output)` on a module; it is called only while one of the
        activations `names` is traced or edited."""
        self.attachment.after(module, lambda m, inputs, y: hook(m, inputs, y) if self.wants(*names) else None)

    @property
    def active(self) -> list[Listener]:
        """The traces and edits of this context (a thread or asyncio task), in the order in which they began."""
        return [listener for listener in OPEN.get() if listener in self.listeners]

    @contextmanager
    def called(self, tokens: Tensor, positions: Tensor | None) -> Iterator[None]:
        """Context manager for one call of the model: notifies active traces and edits of the call."""
        if not (active := self.active):
            yield
            return
        forward = self.forward()
        if forward.positions is not None:
            forward = self.new_forward()
        forward.begin(tokens.size(1), positions, tokens.device)
        for listener in active:
            listener.begin(forward)
        try:
            yield
        finally:
            forward.running = False

    def forward(self) -> Forward:
        """The record of the current call in this thread or asyncio task; a new one if there is none."""
        return FORWARDS.get({}).get(self) or self.new_forward()

    def new_forward(self) -> Forward:
        forward = Forward()
        FORWARDS.set({**FORWARDS.get({}), self: forward})
        return forward

    def forget(self) -> None:
        FORWARDS.set({hooks: forward for hooks, forward in FORWARDS.get({}).items() if hooks is not self})

    def asking(self, name: str) -> Iterator[Listener]:
        return (listener for listener in self.active if name in listener.wanted)

    def wants(self, *names: str) -> bool:
        return any(name in listener.wanted for listener in self.active for name in names)

    def edits(self, *names: str) -> bool:
        return any(listener.edits for name in names for listener in self.asking(name))

    def gradients(self, *names: str) -> bool:
        return torch.is_grad_enabled() and any(one.gradients for name in names for one in self.asking(name))

    def indices(self, name: str) -> set[int]:
        return {index for listener in self.asking(name) for index in listener.wanted[name] if index is not None}

    def visit(
        self,
        name: str,
        value: Tensor,
        axis: int | None = None,
        index: int | None = None,
        mask: AttentionMask | None = None,
    ) -> Tensor:
        """Pass the activation called `name` to the traces and edits that want it; return the edited value, or `value`
        itself if no edit applies.

        `axis` is the axis of heads, units or experts in `value` (None: single ones cannot be selected in this call);
        with an `index`, `value` is only the head, unit or expert of this number; `mask` is the attention mask, for an
        activation with a dimension of keys.
        """
        asking = sorted(self.asking(name), key=lambda listener: not listener.edits)
        if not asking:
            return value
        forward, activation = self.forward(), self.activations[name]
        if name == "embed" and not forward.running and forward.positions is not None:
            forward = self.new_forward()
        for listener in asking:
            if not (forward.running or listener.edits or name in OUTSIDE_BLOCKS):
                continue
            wanted = listener.wanted[name]
            if index in wanted:
                value = listener.visit(index, value, Location(name, activation.shape_of(index), forward, mask))
            if axis is None:
                continue
            for one in sorted(i for i in wanted if i is not None):
                part, location = value.select(axis, one), Location(name, activation.shape_of(one), forward, mask)
                changed = listener.visit(one, value if listener.gradients else part, location)
                if listener.edits:
                    value = value.clone()
                    value.select(axis, one).copy_(changed)
        return value
