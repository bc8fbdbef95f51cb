"""Open and close traces and edits. Until they are closed, compiled blocks of their model run uncompiled."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import RLock
from weakref import WeakKeyDictionary

import torch

from onward.base.errors import UserError
from onward.model.attachments import attach, attached, detach
from onward.model.decoder import Decoder
from onward.model.rows import OPEN
from onward.tracing.hooks import Listener, ModelHooks, Traceable

OF_MODELS: WeakKeyDictionary[Decoder, ModelHooks] = WeakKeyDictionary()  # hooks of the models that are traced or edited
LOCK = RLock()  # guards the hooks of all models
STANCE = ExitStack()  # the compiler's stance while any model is traced or edited
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

    Until the block ends, compiled blocks of the model run uncompiled, because compiled code does not call hooks.
    """
    if is_compiled(model):
        warnings.warn("compiled blocks run uncompiled while they are traced or edited", Uncompiled, stacklevel=5)
    with LOCK:
        hooks = hooks_of(model, listener.known)
        hooks.listeners.append(listener)
        describe(model, hooks)
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
            describe(model, hooks)
            run_uncompiled(-1)


def hooks_of(model: Decoder, known: Mapping[str, Traceable]) -> ModelHooks:
    hooks = OF_MODELS.get(model)
    if hooks is None or not hooks.listeners:
        hooks = OF_MODELS[model] = ModelHooks(known, attach(model, "traces", ""))
        try:
            hooks.add_to(model)
        except UserError:
            detach(model, "traces")
            raise
    return hooks


def describe(model: Decoder, hooks: ModelHooks) -> None:
    counts = Counter("edit" if listener.edits else "trace" for listener in hooks.listeners)
    if counts:
        attach(model, "traces", ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items()))
    else:
        detach(model, "traces")


def run_uncompiled(change: int) -> None:
    """Count active traces and edits, of all models, threads and tasks: while there are any, torch.compile, if it was
    loaded before the first, compiles nothing."""
    global traced
    traced += change
    if not traced:
        STANCE.close()
    elif traced == 1 and "torch._dynamo" in sys.modules:  # an import of the compiler takes seconds
        STANCE.enter_context(torch.compiler.set_stance("force_eager"))


@contextmanager
def unheard() -> Iterator[None]:
    """Hide the calls of models and modules inside the `with` block from all active traces and edits."""
    before = OPEN.set(())
    try:
        yield
    finally:
        OPEN.reset(before)


def is_compiled(model: Decoder) -> bool:
    own = any(block._compiled_call_impl is not None for block in model.blocks)
    return own or any(one.kind == "compilation" for one in attached(model))
