"""Loads the target of `onward doctor`: the folder of a model or of tokens, texts, or a class or function in Python
code."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from onward.base.errors import UserError
from onward.checkpoint.load import load_model, open_source
from onward.data.encoding import encode
from onward.data.sources import documents
from onward.data.tokens import Tokens, is_prepared, load_tokens
from onward.hub.folder import is_model, locate
from onward.inspection.doctor.corpus import Corpus
from onward.inspection.doctor.subject import About, Subject
from onward.text.tokenizer import Tokenizer
from onward.training.stages import inputs_of

TEXT_TOKENS = 256  # tokens of the text on which a trained model is checked


def subjects_of(
    target: str,
    kwargs: str = "",
    adapter: str = "",
    loss: str = "",
    cache: str = "",
    batches: str = "",
    validation_batches: str = "",
    train: str = "",
    text: str = "",
    validation: str = "",
    frozen: str = "",
    vocab_size: int = 0,
    context_length: int = 0,
) -> list[Subject | Corpus]:
    """Load the model, tokens, texts or code that `target`, the argument of `onward doctor`, names. The folder of a run
    gives both a model and its texts. FILE.py:NAME and MODULE:NAME name a model, or a class or function that is called
    with `kwargs` (JSON) and returns a fresh model; other options name objects in the same way (see `About`; "":
    none)."""
    about: About = {"vocab_size": vocab_size, "context_length": context_length, "frozen": frozen}
    for name, value in {"adapter": adapter, "loss": loss, "cache": cache, "train": train}.items():
        if value:
            about[name] = named(value, f"--{name}")  # type: ignore[literal-required]
    for name, value in {"batches": batches, "validation_batches": validation_batches}.items():
        if value:
            batch_source = named(value, f"--{name.replace('_', '-')}")
            about[name] = batch_source() if callable(batch_source) else batch_source  # type: ignore[literal-required]
    if target.endswith(".py"):
        raise UserError(f"{target} is Python code: name one of its classes or functions{choices(target)}")
    if ":" in target and not os.path.exists(target) and "://" not in target:
        model, about["fresh"] = made(target, kwargs)
        return [Subject(model, **about)]
    path = Path(target)
    if is_prepared(path) or (path.exists() and not is_model(path)):
        return [corpus(path, validation)]
    path = locate(target)
    about |= {"trained": True, "tokenizer": open_source(path).tokenizer()}
    texts = [corpus_of_run(path, about["tokenizer"])] if (path / "inputs.json").exists() else []
    tokens = text_tokens(text, about["tokenizer"]) if text else next((c.validation for c in texts), None)
    if tokens is not None and not batches:
        ids = torch.from_numpy(tokens[: TEXT_TOKENS + 1].astype(np.int64))[None]
        about["batches"] = [(ids[:, :-1], ids[:, 1:])]
    return [Subject(loaded(path), **about), *texts]


def loaded(path: Path) -> nn.Module:
    """Load a model with Onward, or with transformers if Onward cannot load it."""
    try:
        return load_model(path)[0]
    except UserError as error:
        try:
            from transformers import AutoModelForCausalLM

            model: nn.Module = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
            return model
        except Exception:
            raise error from None


def corpus(path: Path, validation: str) -> Corpus:
    """Corpus of a folder of prepared tokens, or of text files read as bytes."""
    tokenizer = Tokenizer.load(path) if is_prepared(path) else None
    train = Tokens.join(load_tokens(path).sources) if tokenizer else text_tokens(str(path), None)
    held_out = text_tokens(validation, tokenizer) if validation else None
    return Corpus(train, held_out, tuple(tokenizer.end_ids) if tokenizer else ())


def corpus_of_run(folder: Path, tokenizer: Tokenizer | None) -> Corpus:
    inputs = inputs_of(folder)
    return Corpus(Tokens.join(inputs.train), inputs.validation, tuple(tokenizer.end_ids) if tokenizer else ())


def text_tokens(text: str, tokenizer: Tokenizer | None) -> Tokens:
    """Tokens of a prepared folder or of text files; without a tokenizer, the bytes of the files."""
    if is_prepared(text) and tokenizer:
        return Tokens.join(load_tokens(Path(text)).sources)
    if tokenizer:
        return Tokens.of(*encode(tokenizer, documents([text])))
    pieces = [np.frombuffer(document.encode(), np.uint8) for document in documents([text])]
    return Tokens.of(np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces]))


def made(target: str, kwargs: str) -> tuple[nn.Module, bool]:
    """The model that `target` names, and whether this call created it, so that its weights are fresh."""
    try:
        arguments = json.loads(kwargs or "{}")
    except ValueError as error:
        raise UserError(f"--kwargs is not JSON ({error}): write it as '{{\"vocab_size\": 100}}'") from None
    if not isinstance(arguments, dict):
        raise UserError("--kwargs is not a JSON object: write it as '{\"vocab_size\": 100}'")
    builder = named(target, "the target")
    torch.manual_seed(0)
    try:
        model = builder if isinstance(builder, nn.Module) else builder(**arguments)
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"Cannot create {target} ({what:.300}): give its arguments as --kwargs") from None
    if not isinstance(model, nn.Module):
        raise UserError(
            f"Cannot check {target}, which is {type(model).__name__}: name a torch.nn.Module, or a function "
            "that returns one"
        )
    return model, model is not builder


def named(target: str, what: str) -> Any:
    """The attribute NAME of FILE.py:NAME or MODULE:NAME; error messages call `target` by the name `what`, such as
    `--loss`."""
    source, _, name = target.rpartition(":")
    if not source:
        raise UserError(f"{what} is {target!r}: name it as FILE.py:NAME or MODULE:NAME")
    module = imported(source)
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise UserError(
            f"Cannot find {name!r}, which {what} names, in {source}: choose from {', '.join(known) or 'none'}"
        )
    return getattr(module, name)


def choices(file: str) -> str:
    """Phrase that lists the modules in a Python file, or else its other classes and functions."""
    own = {k: v for k, v in vars(imported(file)).items() if getattr(v, "__module__", "") == Path(file).stem}
    modules = [name for name, value in own.items() if isinstance(value, type) and issubclass(value, nn.Module)]
    names = [f"{file}:{name}" for name in modules or own]
    return f", {' or '.join(names)}" if names else "; it has none"


def imported(source: str) -> ModuleType:
    """Import a Python file, which is executed only once, or a module by name."""
    path = Path(source)
    if source.endswith(".py") and not path.is_file():
        raise UserError(f"there is no file {source}: name it as FILE.py:NAME")
    try:
        if not source.endswith(".py"):
            sys.path.append(os.getcwd())
            return importlib.import_module(source)
        known = sys.modules.get(path.stem)
        if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path.resolve():
            return known
        sys.path.insert(0, str(path.parent.resolve()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"Cannot import {source} ({what:.300}): run it in Python to see the traceback") from None
