"""The options of the commands that load a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Literal

from onward.cli.shared.output import console

if TYPE_CHECKING:
    import torch

    from onward.api.language_model import LanguageModel
    from onward.generation.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How the model is loaded. These options are shared by the commands that load a model."""

    device: str = "auto"  # auto, cpu, cuda, mps
    dtype: Literal["", "float32", "bfloat16"] = ""  # dtype of the weights; default: the dtype of the files
    quantize: Literal["", "int8", "int4"] = ""  # store the weights as integers: smaller and faster, but less accurate
    adapter_folder: str | None = None  # folder of an adapter for the model, written by PEFT or by a run with LoRA
    rope: str | None = None  # extend the context of rotary positions: yarn:2, linear:2, dynamic:2 or llama3:8
    allow_nonfinite: bool = False  # load a model even if some weights are NaN or infinite
    revision: str = ""  # branch, tag or commit of a model on the hub; default: main


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """When decoding steps are compiled. This option is shared by the commands that generate text."""

    compile: bool = False  # compile before the first token, not after 16 tokens, and cache the code for the next start


def compile_steps(engine: Engine, row_counts: Iterable[int]) -> None:
    """Compile decoding steps for each number of rows, and print how long it took or why they stay plain."""
    from time import perf_counter

    from onward.kernels.llvm.kept import private_folder

    start, folder = perf_counter(), code_folder()
    folder = folder and private_folder(folder)
    reason = next(filter(None, (engine.compile(rows, folder) for rows in row_counts)), "")
    took = f"decoding steps compiled in {perf_counter() - start:.1f} s"
    if folder:
        took += f"; their machine code is kept in {folder}"
    message = f"decoding steps stay plain, since they cannot be compiled ({reason})" if reason else took
    console.print(message, markup=False, soft_wrap=True)


def code_folder() -> Path | None:
    """Where compiled decoding steps are kept for later starts; None if the cache has no absolute path."""
    return cache_folder("code")


def cache_folder(name: str) -> Path | None:
    """The folder `name` in the user's cache, which may not exist; None if the cache has no absolute path."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", "")), Path(os.path.expanduser("~/.cache"))
    return next((folder / "onward" / name for folder in caches if folder.is_absolute()), None)


def load(model: str, options: Loading, adapter_folders: Sequence[str] = ()) -> LanguageModel:
    """Load a model as `options` say, with the adapters in `adapter_folders` or else that of `options`."""
    Thread(target=compile_first_kernels, args=(options,)).start()
    import onward

    return onward.load(
        model,
        dtype_of(options),
        options.device,
        quantize=options.quantize or None,
        revision=options.revision,
        adapter_folder=adapter_folders or options.adapter_folder or (),
        rope=options.rope,
        allow_nonfinite=options.allow_nonfinite,
    )


def dtype_of(options: Loading) -> torch.dtype | None:
    import torch

    return getattr(torch, options.dtype) if options.dtype else None


def compile_first_kernels(options: Loading) -> None:
    """Compile and cache the kernels that the first token of most models needs, while PyTorch is imported."""
    from onward.kernels.available import unavailable

    if options.device in ("auto", "cpu") and not unavailable():
        from onward.kernels.llvm import draws, products

        dtype = options.dtype or "float32"
        products.products(options.quantize or dtype, dtype, False)
        draws.draws(dtype, False)
