"""Open and close traces and edits. Compiled blocks of their model run uncompiled meanwhile."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from weakref import WeakKeyDictionary

import torch
from torch import nn

from onward.model.decoder import Decoder
from onward.model.rows import OPEN
from onward.tracing.hooks import Listener, ModelHooks

OF_MODELS: WeakKeyDictionary[Decoder, ModelHooks] = WeakKeyDictionary()  # that are traced or edited
LOCK = RLock()  # of the hooks of all models
STANCE = ExitStack()  # of the compiler, while any model is traced or edited
traced = 0  # number of traces and edits that are open, of all models and contexts


class Uncompiled(UserWarning):
    """The warning that compiled blocks run uncompiled while a trace or an edit is open."""


def is_traced(model: Decoder) -> bool:
    """Return whether a model is traced or edited in this context: a thread, or a task of asyncio."""
    return model in OF_MODELS and bool(OF_MODELS[model].active)


@contextmanager
def listening(model: Decoder, listener: Listener) -> Iterator[None]:
    """Pass the activations of a model to `listener`, a trace or an edit, inside the `with` block, for calls in this
    thread or asyncio task.

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
    """Add `change` (1 when a trace or an edit begins, -1 when it ends) to the number of open traces and edits of all
    models, threads and tasks. While this number is not 0, torch.compile compiles nothing."""
    global traced
    traced += change
    if not traced:
        STANCE.close()
    elif traced == 1 and "torch._dynamo" in sys.modules:  # an import of the compiler takes seconds
        STANCE.enter_context(torch.compiler.set_stance("force_eager"))


@contextmanager
def unheard() -> Iterator[None]:
    """Hide the calls of models and modules inside the `with` block from all open traces and edits."""
    before = OPEN.set(())
    try:
        yield
    finally:
        OPEN.reset(before)


def is_compiled(block: nn.Module) -> bool:
    """Return whether a block of a decoder is compiled by `compile_blocks`, with or without `recompute_blocks`, or by
    `block.compile()`."""
    forward = block.__dict__.get("forward")
    while isinstance(forward, partial):
        if any(hasattr(part, "_torchdynamo_orig_callable") for part in (forward.func, *forward.args)):
            return True
        forward = forward.args[0] if forward.args else None
    return block._compiled_call_impl is not None
