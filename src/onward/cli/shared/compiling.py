"""The option of the commands that compile decoding steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward.base.files import cache_folder
from onward.cli.shared.output import console

if TYPE_CHECKING:
    from onward.generation.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """When to compile decoding steps. The commands that generate text share this option."""

    compile: bool = False  # compile before the first token, not after 16 tokens, and cache the code for the next start


def compile_steps(engine: Engine, row_counts: Iterable[int]) -> None:
    """Compile decoding steps for each number of rows, and print how long this took or why they cannot be compiled."""
    from time import perf_counter

    from onward.kernels.llvm.kept import private_folder

    start, folder = perf_counter(), cache_folder("code")
    folder = folder and private_folder(folder)
    reason = next(filter(None, (engine.compile(rows, folder) for rows in row_counts)), "")
    took = f"decoding steps compiled in {perf_counter() - start:.1f} s"
    if folder:
        took += f"; their machine code is cached in {folder}"
    message = f"decoding steps are not compiled: {reason}" if reason else took
    console.print(message, markup=False, soft_wrap=True)
