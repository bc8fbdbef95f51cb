"""Behavior attached to a finished model: adapters, compilation, a division over processes, traces, and others.

An attachment wraps methods of modules and registers hooks on them. Layers around one method, and hooks of one module,
are always in the order of KINDS, regardless of the order in which they were added. A module without attachments keeps
its own methods. Behavior is attached from outside; the forward methods of a model do not refer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from onward.base.arguments import checked
from onward.base.errors import UserError

KINDS = (  # from the innermost layer around a method to the outermost
    "quantization",  # replaces linear layers
    "adapters",  # hooks change the output of a layer before any other hook reads it
    "compilation",  # compiles a block at its first call, including all hooks on modules inside the block
    "context",  # an axis of processes, each with some tokens of every window
    "pipeline",  # an axis of stages; the last stage sends its columns of the logits, before `tensor` joins them
    "tensor",  # an axis of processes, each with some heads, units and columns of the logits; joins the columns
    "recomputation",  # outside of compiled code, which cannot restore context variables
    "shards",  # FSDP gathers the weights for all inner layers
    "replicas",  # DDP
    "traces",  # and edits, around each call of the whole model
)
RANKS = {kind: rank for rank, kind in enumerate(KINDS)}
ATTACHMENTS = "attachments"  # attribute that holds a model's Attachments; absent if nothing was ever attached
LAYERS = "layers_and_hooks"  # attribute that holds a module's Layers; absent if it has none
Wrapper = Callable[..., Any]  # wrapper(next, *arguments), which may call next(*arguments)


class Attachment:
    """One kind of behavior that is attached to a model, as `onward.attached` lists it. Methods are wrapped and hooks
    registered through it; each such change increments the model's `version`."""

    def __init__(self, attachments: Attachments, kind: str) -> None:
        self.attachments, self.kind, self.description = attachments, kind, ""

    def wrap(self, module: nn.Module, method: str, wrapper: Wrapper) -> None:
        """Add a layer around a method of a module; it replaces a layer of the same kind. Deep copies of the model call
        their own modules if `wrapper` is a function, a `partial` or a bound method whose objects can be copied."""
        Layers.of(module).wrap(module, method, self.kind, wrapper)
        self.attachments.version += 1

    def replace(self, module: nn.Module, method: str, function: Callable[..., Any]) -> None:
        """Replace a method of a module by `function`, a changed version of the class's method: a layer that does not
        call the next layer."""
        layered = Layers.of(module).methods.get(method)
        if (layered.own if layered else module.__dict__.get(method)) is not None:
            raise replaced(self.kind, module, method)
        self.wrap(module, method, partial(instead, function, module))

    def before(self, module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False) -> RemovableHandle:
        """Register a forward pre-hook on a module; with `prepend`, it runs before the hooks of users."""
        handle = module.register_forward_pre_hook(hook, prepend=prepend)
        Layers.of(module).place(handle.id, self.kind, module._forward_pre_hooks, prepend)
        self.attachments.version += 1
        return handle

    def after(self, module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False) -> RemovableHandle:
        """Register a forward hook on a module; with `prepend`, it runs before the hooks of users."""
        handle = module.register_forward_hook(hook, prepend=prepend)
        Layers.of(module).place(handle.id, self.kind, module._forward_hooks, prepend)
        self.attachments.version += 1
        return handle

    def release(self, module: nn.Module) -> None:
        """Remove the layers and hooks of this attachment from one module."""
        if LAYERS in module.__dict__:
            Layers.of(module).release(module, self.kind)
        self.attachments.version += 1

    def __repr__(self) -> str:
        return f"{self.kind}: {self.description}"


class Attachments:
    """The attachments of a model by kind. Every change increments `version`."""

    def __init__(self) -> None:
        self.version = 0
        self.by_kind: dict[str, Attachment] = {}

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.listed()))

    def listed(self) -> tuple[Attachment, ...]:
        return tuple(self.by_kind[kind] for kind in KINDS if kind in self.by_kind)


@dataclass(eq=False)
class LayeredMethod:
    """A method of one module, and the wrappers around it."""

    own: Callable[..., Any] | None  # the method that a user set on the module; None: the method of the class
    wrappers: dict[str, Wrapper] = field(default_factory=dict)  # by kind
    composed: Callable[..., Any] | None = None  # the method with all layers, which is set on the module

    def layered(self, module: nn.Module, method: str, kinds: Sequence[str]) -> Callable[..., Any]:
        """The method with the layers of these kinds."""
        function = self.own or MethodType(getattr(type(module), method), module)
        for kind in kinds:
            if kind in self.wrappers:
                function = partial(self.wrappers[kind], function)
        return function


class Layers:
    """The layered methods of one module, and the ids of its hooks in PyTorch, by kind."""

    def __init__(self) -> None:
        self.methods: dict[str, LayeredMethod] = {}
        self.hooks: dict[str, list[int]] = {}

    @staticmethod
    def of(module: nn.Module) -> Layers:
        layers: Layers = module.__dict__.setdefault(LAYERS, Layers())
        return layers

    def wrap(self, module: nn.Module, method: str, kind: str, wrapper: Wrapper) -> None:
        own = module.__dict__.get(method)
        layered = self.methods.get(method) or LayeredMethod(own)
        if layered.composed is not own and layered.composed is not None:
            raise replaced(kind, module, method)
        layered.wrappers[kind] = wrapper
        layered.composed = module.__dict__[method] = layered.layered(module, method, KINDS)
        self.methods[method] = layered

    def release(self, module: nn.Module, kind: str) -> None:
        for method, layered in list(self.methods.items()):
            if layered.wrappers.pop(kind, None) is not None:
                self.unwrap(module, method, layered)
        for number in self.hooks.pop(kind, ()):
            module._forward_pre_hooks.pop(number, None)
            module._forward_hooks.pop(number, None)
        if not self.methods and not self.hooks:
            del module.__dict__[LAYERS]

    def unwrap(self, module: nn.Module, method: str, layered: LayeredMethod) -> None:
        if not layered.wrappers:
            del self.methods[method]
        if module.__dict__.get(method) is not layered.composed:
            return  # keep a method that a user has set since
        if layered.wrappers:
            layered.composed = module.__dict__[method] = layered.layered(module, method, KINDS)
        elif layered.own is not None:
            module.__dict__[method] = layered.own
        else:
            del module.__dict__[method]

    def place(self, number: int, kind: str, hooks: Any, prepended: bool) -> None:
        """Record the kind of a new hook, the first or the last entry of the OrderedDict `hooks`, and restore the order
        of kinds."""
        self.hooks.setdefault(kind, []).append(number)
        if len(self.hooks) > 1:
            known = [(RANKS[each], one) for each, numbers in self.hooks.items() for one in numbers if one in hooks]
            for rank, one in sorted(known, reverse=prepended):
                if (rank < RANKS[kind]) if prepended else (rank > RANKS[kind]):
                    hooks.move_to_end(one, last=not prepended)


def instead(function: Callable[..., Any], module: nn.Module, _: Callable[..., Any], *arguments: Any) -> Any:
    return function(module, *arguments)


def replaced(kind: str, module: nn.Module, method: str) -> UserError:
    name = f"{type(module).__name__}.{method}"
    return UserError(f"Cannot attach {kind}, because {name} was replaced by hand: restore it first")


def attach(model: nn.Module, kind: str, description: str) -> Attachment:
    """Return the attachment of a kind in KINDS, which is created if the model has none; sets its description."""
    attachments: Attachments = model.__dict__.setdefault(ATTACHMENTS, Attachments())
    if kind not in attachments.by_kind:
        attachments.by_kind[kind] = Attachment(attachments, kind)
    attachments.by_kind[kind].description = description
    attachments.version += 1
    return attachments.by_kind[kind]


def detach(model: nn.Module, kind: str) -> None:
    """Remove all layers and hooks of a kind from a model; if no other kind is attached, its modules use their own
    methods again: those of their classes, or those that a user has set."""
    attachments: Attachments | None = model.__dict__.get(ATTACHMENTS)
    if attachments is None or attachments.by_kind.pop(kind, None) is None:
        return
    attachments.version += 1
    for module in model.modules():
        if LAYERS in module.__dict__:
            Layers.of(module).release(module, kind)


def keep_hooks(module: nn.Module, successor: nn.Module) -> None:
    """Pass a layer's hooks and submodules, such as adapters, on to the `successor` that replaces it."""
    successor._modules.update(module._modules)
    hooks = "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"
    for name in (*hooks, "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", LAYERS):
        if name in module.__dict__:
            successor.__dict__[name] = module.__dict__[name]


def without(kind: str, module: nn.Module, method: str) -> Callable[..., Any]:
    """Return a layered method of a module without its layer of a kind."""
    return Layers.of(module).methods[method].layered(module, method, [one for one in KINDS if one != kind])


def version(model: nn.Module) -> int:
    """Return a counter that increases with every change of a model's attachments; 0 if nothing was ever attached.
    Choosing among adapters for one call (`Selection.use`) is not a change."""
    attachments: Attachments | None = model.__dict__.get(ATTACHMENTS)
    return 0 if attachments is None else attachments.version


@checked
def attached(model: nn.Module) -> tuple[Attachment, ...]:
    """Return the attachments of a model, such as adapters, compilation or traces, in the order in which they apply,
    each with its kind and a description; `print(model)` shows the same lines."""
    attachments: Attachments | None = model.__dict__.get(ATTACHMENTS)
    return () if attachments is None else attachments.listed()
