"""The options of the commands that load a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from onward.api.language_model import LanguageModel


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


def load(model: str, options: Loading, adapter_folders: Sequence[str] = ()) -> LanguageModel:
    """Load a model with `options` and the adapters in `adapter_folders` or, by default, the adapter of `options`."""
    # not a daemon, even if a server's daemon thread starts it: LLVM would crash while Python exits
    Thread(target=compile_first_kernels, args=(options,), daemon=False).start()
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
