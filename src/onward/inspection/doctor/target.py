"""A model that the doctor is pointed at: a folder, or a class or function in a Python file or module."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from onward.checkpoint.folder import load_model
from onward.errors import UserError
from onward.hub import locate
from onward.inspection.doctor.subject import Subject


def subject_of(
    target: str, kwargs: str = "", adapter: str = "", vocab_size: int = 0, context_length: int = 0
) -> Subject:
    """The subject that a target names: a folder or a name on the hub, FILE.py:NAME or MODULE:NAME.

    NAME is a class or function, which is called with `kwargs` (JSON) and gives a fresh model, or a model.
    """
    call = named(adapter, "--adapter") if adapter else None
    fresh = ":" in target and not os.path.exists(target) and "://" not in target
    model = made(target, kwargs) if fresh else load_model(locate(target))[0]
    return Subject(model, vocab_size=vocab_size, context_length=context_length, fresh=fresh, adapter=call)


def made(target: str, kwargs: str) -> nn.Module:
    """The model of FILE.py:NAME or MODULE:NAME."""
    try:
        arguments = json.loads(kwargs or "{}")
    except ValueError as error:
        raise UserError(f"--kwargs is no JSON ({error}): write it as '{{\"vocab_size\": 100}}'") from None
    if not isinstance(arguments, dict):
        raise UserError("--kwargs holds no table: write it as '{\"vocab_size\": 100}'")
    found = named(target, "the target")
    torch.manual_seed(0)
    try:
        model = found if isinstance(found, nn.Module) else found(**arguments)
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{target} cannot be made ({what:.300}): give its arguments as --kwargs") from None
    if not isinstance(model, nn.Module):
        raise UserError(f"{target} gives {type(model).__name__}: name a torch.nn.Module, or what returns one")
    return model


def named(target: str, what: str) -> Any:
    """The attribute NAME of FILE.py:NAME or MODULE:NAME."""
    place, _, name = target.rpartition(":")
    module = imported(place)
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise UserError(f"{what} names {name!r}, which {place} does not have: choose from {', '.join(known) or 'none'}")
    return getattr(module, name)


def imported(place: str) -> ModuleType:
    """The module in a file, or of a name."""
    path = Path(place)
    if place.endswith(".py") and not path.is_file():
        raise UserError(f"there is no file {place}: name it as FILE.py:NAME")
    try:
        if not place.endswith(".py"):
            sys.path.append(os.getcwd())
            return importlib.import_module(place)
        sys.path.insert(0, str(path.parent.resolve()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{place} cannot be imported ({what:.300}): run it in Python to see where") from None
