"""The hooks on a model by which traces and edits reach its activations.

All traces and edits of a model share one `Taps`. A site of `sites.py` calls `visit` with an activation: edits change
it, in the order in which they began, then traces record it. Modules have hooks only for activations that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from onward.model.context import AttentionContext
from onward.model.decoder import Decoder

Attach = Callable[["Taps"], Iterator[RemovableHandle]]  # adds the hooks of a site


@dataclass(frozen=True)
class Activation:
    """An activation of a decoder: how it is reached, and its shape."""

    site: Attach
    shape: tuple[str | int, ...]  # B, T, S and numbers
    axis: int | None = None  # of its heads, units or experts, one of which a number after the name selects
    count: int = 0  # of these, where the axis does not have all of them
    editable: bool = True

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.shape))})"

    @property
    def parts(self) -> int:
        """The number of heads, units or experts that a number after the name selects; 0: there are none."""
        return 0 if self.axis is None else self.count or int(self.shape[self.axis])


class Listener(Protocol):
    """A trace or an edit."""

    wanted: dict[str, set[int | None]]  # names of activations; None for all of it, numbers for heads, units or experts
    gradients: bool  # whether gradients of the activations are kept
    edits: bool  # whether it changes activations

    def begin(self) -> None:
        """A call of the model begins."""

    def locate(self, positions: Tensor) -> None:
        """The tokens of the call are at these positions, (B or 1, T)."""

    def visit(self, name: str, index: int | None, value: Tensor) -> Tensor:
        """The activation, or one head, unit or expert of it, as it is from now on."""


class Taps:
    """The hooks of one model, and the traces and edits that use them."""

    def __init__(self, model: Decoder, activations: Mapping[str, Activation]) -> None:
        self.model, self.activations = model, activations
        self.listeners: list[Listener] = []
        self.handles: list[RemovableHandle] = []
        self.calling = False  # False while activation checkpointing computes a block again: that is not recorded

    def attach(self) -> None:
        """Put the hooks of all listeners in place of those there are."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if not self.listeners:
            return
        self.handles += self.beginning()
        for site in {a.site: None for name, a in self.activations.items() if self.wants(name)}:
            self.handles += site(self)
        self.handles.append(self.model.norm.register_forward_hook(self.end))

    def end(self, *_: object) -> None:
        """The hidden states of a call are done."""
        self.calling = False

    def beginning(self) -> Iterator[RemovableHandle]:
        """Hooks where a call of the model begins."""
        embedded = False

        def begin() -> None:
            self.calling = True
            for listener in self.listeners:
                listener.begin()

        def before_embedding(*_: object) -> None:
            nonlocal embedded
            embedded = True
            begin()

        def after_embedding(*_: object) -> None:  # vectors in place of ids are not embedded
            nonlocal embedded
            if not embedded:
                begin()
            embedded = False

        def locate(_: object, inputs: tuple[Tensor, AttentionContext]) -> None:
            for listener in self.listeners if self.calling else ():
                listener.locate(inputs[1].mask.query_positions)

        yield self.model.embed.register_forward_pre_hook(before_embedding)
        yield self.model.embed_in.register_forward_pre_hook(after_embedding)
        yield self.model.blocks[0].register_forward_pre_hook(locate)

    def asking(self, name: str) -> Iterator[Listener]:
        """The traces and edits that ask for an activation."""
        return (listener for listener in self.listeners if name in listener.wanted)

    def wants(self, *names: str) -> bool:
        """Whether any of these activations is traced or edited."""
        return any(True for name in names for _ in self.asking(name))

    def edits(self, *names: str) -> bool:
        """Whether any of these activations is edited."""
        return any(listener.edits for name in names for listener in self.asking(name))

    def gradients(self, *names: str) -> bool:
        """Whether the gradient of any of these activations is kept."""
        return torch.is_grad_enabled() and any(one.gradients for name in names for one in self.asking(name))

    def indices(self, name: str) -> set[int]:
        """The heads, units or experts of an activation that are asked for one by one."""
        return {index for listener in self.asking(name) for index in listener.wanted[name] if index is not None}

    def visit(self, name: str, value: Tensor, axis: int | None = None, index: int | None = None) -> Tensor:
        """The activation as the model goes on with it: `value` itself where nothing is edited.

        `axis` is that of its heads, units or experts; `index` says that `value` is one of them.
        """
        for listener in sorted(self.asking(name), key=lambda listener: not listener.edits):
            if not (self.calling or listener.edits or name == "logits"):
                continue
            wanted = listener.wanted[name]
            if index in wanted:
                value = listener.visit(name, index, value)
            if axis is None:
                continue
            for one in sorted(i for i in wanted if i is not None):
                part = value.select(axis, one)
                changed = listener.visit(name, one, value if listener.gradients else part)
                if listener.edits:
                    value = value.clone()
                    value.select(axis, one).copy_(changed)
        return value
