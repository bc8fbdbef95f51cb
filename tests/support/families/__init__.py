"""Tiny configurations of every family for its special cases: one file per family file, each with `CASES`."""

import importlib
import pkgutil

from transformers import PreTrainedConfig

NAMES = [found.name for found in pkgutil.iter_modules(__path__)]
CASES: dict[str, PreTrainedConfig] = {
    f"{name}: {case}": hf for name in NAMES for case, hf in importlib.import_module(f"{__name__}.{name}").CASES.items()
}
