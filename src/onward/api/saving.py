"""Saves models and adapters, and merges an adapter into its model."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch

from onward.api.folders import load
from onward.api.language_model import LanguageModel
from onward.base.arguments import Range, checked
from onward.base.errors import UserError
from onward.checkpoint.gguf.convert import Accept, check_importance, plan, write_model
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import open_source
from onward.checkpoint.peft.adapters import save_adapter as write_adapter
from onward.checkpoint.peft.bases import BaseModel, base_folder, weights_checksum
from onward.checkpoint.weights import FLOATS
from onward.model.adapters import adapter_names
from onward.transforms.lora import merge_lora


@checked
def save(
    lm: LanguageModel,
    path: str | Path,
    *,
    shard_bytes: Annotated[float, Range(1, math.inf)] = 5e9,
    dtype: Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k"] | None = None,
    accept: Sequence[Accept] = (),
    importance: str = "",
) -> None:
    """Write a model and its tokenizer as a Hugging Face folder, its weights in files of at most `shard_bytes` bytes;
    or, to a path that ends in .gguf, as a GGUF file.

    Quantized layers are written in the format pack-quantized of compressed-tensors, and stay quantized when loaded. A
    tensor of more than `shard_bytes` bytes gets its own file. `dtype` is the dtype of the weights in a GGUF file, by
    default the dtype of the model. For a GGUF file, raises a UserError, before anything is written, if no architecture
    of llama.cpp computes the same function as this model. `accept` names differences that llama.cpp's computation may
    have: "epsilon" (the norms of latents use the epsilon of the other norms), "gelu" (the tanh form in place of the
    exact one), "phimoe" (RMSNorm and a plain softmax in Phi-3.5-MoE), "ramp" (YaRN's ramp, rounded to whole pairs),
    "step" (no minimum step size in Mamba-2), "window" (no sliding window). `importance` is a text like those that the
    model will read: in a file of dtype q4_k_m, q5_k_m or q6_k, weights with large inputs on this text keep more
    precision.
    """
    if names := adapter_names(lm.model):
        raise UserError(
            f"Cannot save a model with the adapter {names[0]}: merge it with merge_lora or onward merge, "
            "or save only the adapter with save_adapter"
        )
    path, hf = Path(path), lm.hf
    if path.suffix == ".gguf":
        check_importance(dtype or "", importance)
        gguf_plan = plan(
            lm.model, lm.tokenizer, (dtype or "").upper(), path.stem, str(hf.get("model_type", "")), accept
        )
        return write_model(lm.model, gguf_plan, path, tokens=lm.text().encode(importance) if importance else ())
    if dtype is not None:
        raise UserError(
            f"Cannot write a folder in dtype {dtype!r}, which is for files that end in .gguf: load the model "
            "in another dtype"
        )
    if lm.tokenizer is not None and len(lm.tokenizer.end_ids) > 1:
        hf = {**hf, "eos_token_id": lm.tokenizer.end_ids}  # the tokenizer's files name only one end token
    save_model(lm.model, path, hf, shard_bytes)
    if lm.tokenizer is not None:
        lm.tokenizer.save(path)
    return None


@checked
def save_adapter(lm: LanguageModel, folder: str | Path, base: str | Path, *, name: str = "default") -> None:
    """Write the adapter `name` of a model, and its fully trained modules, into `folder` in the format of PEFT.

    `base` is the folder that the model was loaded from; its checksum is stored with the adapter. Raises a UserError if
    `base` holds no model.
    """
    if not (Path(base) / "config.json").exists():
        raise UserError(f"Cannot find a model in the base {base}: give the folder that the model was loaded from")
    model = BaseModel(str(base), weights_checksum(Path(base)))
    write_adapter(lm.model, Path(folder), lm.hf, model, name)


@checked
def merge(
    adapter_folder: str | Path,
    out: str | Path,
    base: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: Annotated[float, Range(1, math.inf)] = 5e9,
) -> None:
    """Load a model and an adapter, add the adapter's changes to the weights, and write the merged model to the folder
    `out`. Sums are computed in fp32 and rounded once.

    `base` is the folder of the model, by default the one that the adapter names; `dtype` is the dtype of the merged
    weights, by default that of most tensors of the base, or bf16 if these are quantized. `shard_bytes` is the same as
    in `save`. Raises a UserError if `out` is the folder of the base or of the adapter.
    """
    base = Path(base) if base else base_folder(Path(adapter_folder))
    for part, folder in ("base", base), ("adapter", Path(adapter_folder)):
        if Path(out).exists() and folder.exists() and os.path.samefile(out, folder):
            raise UserError(f"Cannot write the merged model to {out}, the folder of its {part}: choose another out")
    lm = load(base, torch.float32, "cpu", adapter_folder=adapter_folder)
    merge_lora(lm.model, adapter_names(lm.model)[0])
    stored = Counter(tensor.dtype for tensor in open_source(base).stored().values())
    lm.model.to(dtype or FLOATS.get(stored.most_common(1)[0][0], torch.bfloat16))
    save(lm, out, shard_bytes=shard_bytes)
