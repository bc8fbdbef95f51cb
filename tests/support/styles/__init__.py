"""Ten common styles of decoders, one file each, all correct: tests plant bugs in their lines."""

import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from support.mutants import KINDS
from support.substitutions import substituted

STYLES = {path.stem: path.read_text() for path in sorted(Path(__file__).parent.glob("[!_]*.py"))}


def made(source: str) -> nn.Module:
    """The model defined in the source of a file."""
    module = ModuleType("patient")
    sys.modules["patient"] = module  # dataclasses look up their module in sys.modules
    exec(compile(source, "patient.py", "exec"), vars(module))
    torch.manual_seed(0)
    model: nn.Module = module.GPT()
    return model


def edited(style: str, changes: str) -> str:
    """The source of a style with replaced lines."""
    return substituted(STYLES[style], changes)


def mutant(style: str, kind: str) -> nn.Module:
    """The model in this style with a bug of this kind."""
    return made(edited(style, KINDS[kind][style]))
