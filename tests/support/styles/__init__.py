"""Ten styles in which people write decoders, one file each, all healthy: tests plant bugs in their lines."""

import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from support.mutants import AND, KINDS

STYLES = {path.stem: path.read_text() for path in sorted(Path(__file__).parent.glob("[!_]*.py"))}


def made(source: str) -> nn.Module:
    """The model in the source of a file."""
    module = ModuleType("patient")
    sys.modules["patient"] = module  # dataclasses look their module up
    exec(compile(source, "patient.py", "exec"), vars(module))
    torch.manual_seed(0)
    model: nn.Module = module.GPT()
    return model


def mutant(style: str, kind: str) -> nn.Module:
    """The model of a style with a bug of this kind."""
    source = STYLES[style]
    for change in KINDS[kind][style].split(AND):
        line, _, instead = change.partition(" => ")
        assert source.count(line) > 0, f"{style} has no line {line!r}"
        source = source.replace(line, instead)
    return made(source)
