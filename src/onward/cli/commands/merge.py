"""onward merge: an adapter and its base as one model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import ClassVar, Literal

from onward.base.errors import UserError
from onward.cli.shared.options import parse
from onward.cli.shared.output import console

ABOUT = """\
Add an adapter (LoRA, rsLoRA or DoRA, from PEFT or a LoRA run) to the weights of its base model, and write the sum as
an ordinary model. The sum is computed in fp32 and rounded once.

examples:
  onward merge runs/poems merged                            uses the base named in the adapter
  onward merge runs/poems merged --from runs/mybook
  onward merge runs/poems merged --dtype float32
"""


@dataclass(frozen=True)
class Options:
    """The options of `onward merge`, which adds an adapter to the weights of its base."""

    positional: ClassVar[tuple[str, ...]] = ("adapter_folder", "out")
    adapter_folder: str  # folder of the adapter
    out: str  # new folder, to which the model is written
    base: str = ""  # folder of the base; default: the base named in the adapter
    dtype: Literal["", "float32", "bfloat16"] = ""  # dtype of the result; default: the dtype of the base


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward merge", about=ABOUT)
    if Path(options.out).exists():
        raise UserError(f"{options.out} exists already: name a new folder")
    import torch

    import onward

    dtype = getattr(torch, options.dtype) if options.dtype else None
    onward.merge(options.adapter_folder, options.out, options.base or None, dtype=dtype)
    console.print(f"merged: {quote(options.out)}", markup=False, soft_wrap=True)
