"""Names of activations: patterns, numbers after a name, and the nearest names of one that does not exist."""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from threading import RLock
from weakref import WeakKeyDictionary

import torch
from torch import nn

from onward.arguments import checked
from onward.errors import UserError
from onward.model.decoder import Decoder
from onward.tracing.hooks import OPEN, Activation, Listener, ModelHooks
from onward.tracing.sites import activations

NEAREST = 4  # names that a message lists
OF_MODELS: WeakKeyDictionary[Decoder, ModelHooks] = WeakKeyDictionary()  # that are traced or edited
LOCK = RLock()  # of the hooks of all models
STANCE = ExitStack()  # of the compiler, while any model is traced or edited
traced = 0  # number of traces and edits that are open, of all models and contexts


class Uncompiled(UserWarning):
    """Blocks that are compiled run uncompiled for a while."""


@checked
def activation_names(model: Decoder) -> dict[str, str]:
    """The names of all activations of a model, with their shapes: `{"blocks.0.attn.weights": "(B, 4, T, S)", ...}`.

    B is the number of sequences, T the tokens of a call, S the keys that its queries see.
    """
    return {name: str(activation) for name, activation in activations(model).items()}


def full_name(name: str) -> str:
    """`blocks.3` is short for `blocks.3.out`."""
    return f"{name}.out" if re.fullmatch(r"blocks\.[\d*]+", name) else name


def unknown(pattern: str, known: Iterable[str]) -> UserError:
    """The error for a pattern that names no activation: it lists the nearest names."""
    near = difflib.get_close_matches(full_name(pattern), [*known], n=NEAREST, cutoff=0)
    return UserError(f"{pattern!r} is not an activation of this model: the nearest are {', '.join(near)}")


def resolve(known: Mapping[str, Activation], patterns: Iterable[str]) -> dict[str, set[int | None]]:
    """The activations that patterns name: None for the whole of one, numbers for its heads, units or experts.

    `*` in a pattern stands for any characters. A UserError lists the names nearest to one that does not exist.
    """
    found: dict[str, set[int | None]] = {}
    for pattern in patterns:
        index: int | None = None
        names = [name for name in known if fnmatchcase(name, full_name(pattern))]
        base, _, last = pattern.rpartition(".")
        if not names and last.isdecimal():
            index = int(last)
            names = [name for name in known if fnmatchcase(name, base) and known[name].parts]
            if few := next((name for name in names if index >= known[name].parts), None):
                raise UserError(f"{pattern!r}: {few} has {known[few].parts} of them, from 0 to {known[few].parts - 1}")
        if not names:
            raise unknown(pattern, known)
        for name in names:
            found.setdefault(name, set()).add(index)
    return found


def is_traced(model: Decoder) -> bool:
    """Whether a model is traced or edited in this context: a thread, or a task of asyncio."""
    return model in OF_MODELS and bool(OF_MODELS[model].active)


@contextmanager
def listening(model: Decoder, listener: Listener) -> Iterator[None]:
    """Give the activations of a model to a trace or an edit inside the `with` block, in calls of this context.

    Compiled blocks run uncompiled meanwhile, since compiled code does not call hooks.
    """
    if any(map(is_compiled, model.blocks)):
        warnings.warn("compiled blocks run uncompiled while they are traced or edited", Uncompiled, stacklevel=5)
    with LOCK:
        hooks = OF_MODELS.get(model)
        if hooks is None or not hooks.listeners:
            hooks = OF_MODELS[model] = ModelHooks(model, listener.known)
            hooks.attach()
        hooks.listeners.append(listener)
        run_uncompiled(1)
    OPEN.set((*OPEN.get(), listener))
    try:
        yield
    finally:
        OPEN.set(tuple(one for one in OPEN.get() if one is not listener))
        with LOCK:
            hooks.listeners.remove(listener)
            if not hooks.active:
                hooks.forget()
            if not hooks.listeners:
                hooks.detach()
            run_uncompiled(-1)


def run_uncompiled(change: int) -> None:
    """Count the traces and edits of all models and contexts: while any is open, torch.compile compiles nothing."""
    global traced
    traced += change
    if not traced:
        STANCE.close()
    elif traced == 1 and "torch._dynamo" in sys.modules:  # an import of the compiler takes seconds
        STANCE.enter_context(torch.compiler.set_stance("force_eager"))


@contextmanager
def unheard() -> Iterator[None]:
    """No trace or edit sees the calls of modules inside the `with` block."""
    before = OPEN.set(())
    try:
        yield
    finally:
        OPEN.reset(before)


def is_compiled(block: nn.Module) -> bool:
    """Whether a block is compiled: by `compile_blocks`, before `recompute_blocks` or not, or by `block.compile()`."""
    forward = block.__dict__.get("forward")
    while isinstance(forward, partial):
        if any(hasattr(part, "_torchdynamo_orig_callable") for part in (forward.func, *forward.args)):
            return True
        forward = forward.args[0] if forward.args else None
    return block._compiled_call_impl is not None
