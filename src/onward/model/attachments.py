"""Behavior attached to a finished model: adapters, compilation, a division over processes, traces, and others.

An attachment wraps methods of modules and registers hooks on them. Layers around one method, and hooks of one module,
are always in the order of KINDS, whatever the order of the calls. A module without attachments has only the methods of
its class. Behavior is attached from outside; the forward of a model knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from onward.base.arguments import checked
from onward.base.errors import UserError

KINDS = (  # from the innermost layer around a method to the outermost
    "quantization",  # replaces linear layers
    "adapters",  # hooks change the output of a layer before any other hook reads it
    "compilation",  # compiles a block's method, with the hooks on the modules inside of the block
    "context",  # an axis of processes, each with some tokens of every window
    "pipeline",  # stages: a stage computes `logits` of its part of the vocabulary, and sends those
    "tensor",  # an axis of processes, each with some heads and units, and some columns of the logits, then joined
    "recomputation",  # outside of compiled code, which cannot restore context variables
    "shards",  # FSDP gathers the weights for everything inside
    "replicas",  # DDP
    "traces",  # and edits, around each call of the whole model
)
RANKS = {kind: rank for rank, kind in enumerate(KINDS)}
ATTACHMENTS = "attachments"  # the attribute of a model that has its Attachments; absent if nothing was ever attached
LAYERS = "layers_and_hooks"  # the attribute of a module that has its Layers; absent without any
Wrapper = Callable[..., Any]  # wrapper(next, *arguments), which calls next(*arguments)
PRE, POST = "_forward_pre_hooks", "_forward_hooks"


class Attachment:
    """One kind of behavior that is attached to a model, as `onward.attached` lists it. Methods are wrapped and hooks
    registered through it; each of these raises the model's `version`."""

    def __init__(self, attachments: Attachments, kind: str) -> None:
        self.attachments, self.kind, self.description = attachments, kind, ""

    def wrap(self, module: nn.Module, method: str, wrapper: Wrapper) -> None:
        """Add a layer around a method of a module, in place of one of the same kind. Deep copies of the model call
        their own modules if `wrapper` is a function, a `partial` or a bound method whose objects can be copied."""
        layers = Layers.of(module)
        layers.wrappers.setdefault(method, {})[self.kind] = wrapper
        layers.compose(module, method)
        self.attachments.version += 1

    def before(self, module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False) -> int:
        """Register a forward pre-hook and return its number for `drop`; `prepend` puts it in front of users' hooks."""
        return self.register(module, module.register_forward_pre_hook(hook, prepend=prepend).id, PRE, prepend)

    def after(self, module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False) -> int:
        """Register a forward hook and return its number for `drop`; `prepend` puts it in front of users' hooks."""
        return self.register(module, module.register_forward_hook(hook, prepend=prepend).id, POST, prepend)

    def register(self, module: nn.Module, number: int, hooks: str, prepend: bool) -> int:
        Layers.of(module).place(number, self.kind, getattr(module, hooks), prepend)
        self.attachments.version += 1
        return number

    def release(self, module: nn.Module) -> None:
        """Remove the layers and hooks of this attachment from one module."""
        Layers.release(module, self.kind)
        self.attachments.version += 1

    def __repr__(self) -> str:
        return f"{self.kind}: {self.description}"


class Attachments:
    """The attachments of a model by kind. `version` is raised by every change of them."""

    def __init__(self) -> None:
        self.version = 0
        self.by_kind: dict[str, Attachment] = {}

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.listed()))

    def listed(self) -> tuple[Attachment, ...]:
        return tuple(self.by_kind[kind] for kind in KINDS if kind in self.by_kind)


@dataclass(eq=False)
class Layers:
    """The layers around the methods of one module, and the kinds of its hooks."""

    wrappers: dict[str, dict[str, Wrapper]] = field(default_factory=dict)  # by method and kind
    inner: dict[str, Callable[..., Any]] = field(default_factory=dict)  # methods that a user had set on the module
    composed: dict[str, Callable[..., Any]] = field(default_factory=dict)  # the methods with all layers
    hooks: dict[int, str] = field(default_factory=dict)  # kinds, by PyTorch's number of the hook

    @classmethod
    def of(cls, module: nn.Module) -> Layers:
        layers: Layers = module.__dict__.setdefault(LAYERS, cls())
        return layers

    @classmethod
    def release(cls, module: nn.Module, kind: str) -> None:
        layers: Layers | None = module.__dict__.get(LAYERS)
        if layers is None:
            return
        for method, wrappers in list(layers.wrappers.items()):
            if wrappers.pop(kind, None) is not None:
                layers.compose(module, method)
        for number in [number for number, one in layers.hooks.items() if one == kind]:
            layers.drop(module, number)
        if not layers.wrappers and not layers.hooks:
            del module.__dict__[LAYERS]

    def compose(self, module: nn.Module, method: str) -> None:
        """Set the method of a module to the plain method with the present layers around it. Raises a UserError if it
        was replaced since it got its first layer."""
        own, known = module.__dict__.get(method), self.composed.get(method)
        is_own = own is known  # rather than a user's method that is to be the innermost one, or was set meanwhile
        if known is None and own is not None:
            self.inner[method], is_own = own, True
        if not self.wrappers[method]:
            del self.wrappers[method], self.composed[method]
            inner = self.inner.pop(method, None)
            if is_own and inner is None:
                del module.__dict__[method]
            elif is_own:
                module.__dict__[method] = inner
            return
        if not is_own:
            name = f"{type(module).__name__}.{method}"
            raise UserError(f"Cannot attach a layer around {name}, because it was replaced by hand: restore it first")
        module.__dict__[method] = self.composed[method] = self.within(module, method, len(KINDS))

    def within(self, module: nn.Module, method: str, rank: int) -> Callable[..., Any]:
        function = self.inner.get(method) or MethodType(getattr(type(module), method), module)
        wrappers = self.wrappers.get(method, {})
        for kind in KINDS[:rank]:
            if kind in wrappers:
                function = partial(wrappers[kind], function)
        return function

    def place(self, number: int, kind: str, hooks: Any, prepended: bool) -> None:
        """Record the kind of a new hook, and move hooks of kinds that run before or after it, in an OrderedDict."""
        self.hooks[number] = kind
        known = [(RANKS[self.hooks[one]], one) for one in hooks if one in self.hooks]
        if prepended:
            for rank, one in reversed(known):
                if rank < RANKS[kind]:
                    hooks.move_to_end(one, last=False)
        else:
            for rank, one in known:
                if rank > RANKS[kind]:
                    hooks.move_to_end(one)

    def drop(self, module: nn.Module, number: int) -> None:
        del self.hooks[number]
        module._forward_pre_hooks.pop(number, None)
        module._forward_hooks.pop(number, None)


def attach(model: nn.Module, kind: str, description: str) -> Attachment:
    """Return the attachment of a kind in KINDS, a new one or the one that the model has, with this description."""
    attachments: Attachments = model.__dict__.setdefault(ATTACHMENTS, Attachments())
    if kind not in attachments.by_kind:
        attachments.by_kind[kind] = Attachment(attachments, kind)
    attachments.by_kind[kind].description = description
    attachments.version += 1
    return attachments.by_kind[kind]


def detach(model: nn.Module, kind: str) -> None:
    """Remove all layers and hooks of a kind from a model; without others, its modules have the methods of their classes
    again."""
    attachments: Attachments | None = model.__dict__.get(ATTACHMENTS)
    if attachments is None or attachments.by_kind.pop(kind, None) is None:
        return
    attachments.version += 1
    for module in model.modules():
        Layers.release(module, kind)


def within(module: nn.Module, method: str, kind: str) -> Callable[..., Any]:
    """Return a method of a module with only the layers inside that of a kind."""
    return Layers.of(module).within(module, method, RANKS[kind])


def version(model: nn.Module) -> int:
    """Return a number that every change of what is attached to a model raises; 0 if nothing was ever attached. The
    choice among adapters for one call (`Selection.use`) is no change."""
    attachments: Attachments | None = model.__dict__.get(ATTACHMENTS)
    return 0 if attachments is None else attachments.version


@checked
def attached(model: nn.Module) -> tuple[Attachment, ...]:
    """Return what is attached to a model, such as adapters, compilation or traces, in the order in which it applies,
    each with its kind and a description; `print(model)` shows the same lines."""
    attachments: Attachments | None = model.__dict__.get(ATTACHMENTS)
    return () if attachments is None else attachments.listed()
