"""LoRA adapters as GGUF files, in the format of llama.cpp's convert_lora_to_gguf.py. A file has two factors for each
adapted tensor of the base, `.lora_a` (R, I) and `.lora_b` (O, R); those of a stack of experts have a leading axis.

llama.cpp multiplies their product by alpha / R, where R is the rank of the tensor. It applies adapters only to tensors
that its graphs multiply with one particular function, and ignores adapters of other tensors without a message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.gguf.convert import Accept, matching
from onward.checkpoint.gguf.latent import LatentArchitecture
from onward.checkpoint.gguf.writer import TensorOutline, type_of, write_gguf
from onward.checkpoint.names import rows
from onward.checkpoint.packed import moves_rows
from onward.model.adapters import Adapter, adapter_names, check_adapter
from onward.model.decoder import Decoder
from onward.transforms.heads import head_labels
from onward.transforms.lora import joined_adapters, token_rows

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
APPLIED = re.compile(  # tensors whose adapters llama.cpp applies in every architecture
    r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down)(_exps|_shexp)?|ffn_gate_inp|ssm_(in|out))\.weight"
)
LATENT = re.compile(r".*\.attn_(q|k|v)\.weight")  # multiplied separately where keys come from a latent


def write_adapter(
    model: Decoder, path: Path, name: str, family: str = "", file_name: str = "adapter", dry: bool = False
) -> dict[str, TensorOutline]:
    """Write the adapter `name` of a model as a GGUF file for the base model's GGUF file, unless it is a `dry` run.
    `family` is the model_type of the base; `file_name` the adapter's name in the file. Returns the file's tensors.

    Raises a UserError, before the file is written, if llama.cpp does not support the base, or if it would not apply
    everything that was trained.
    """
    check_adapter(name, adapter_names(model))
    with torch.device("meta"):
        plain = dict(Decoder(model.config).named_parameters())
    try:
        kind = matching(model.config, plain, "model", family).architecture
    except UserError:  # a base whose differences the user has accepted
        kind = matching(model.config, plain, "model", family, get_args(Accept)).architecture
    check(model, name, kind.folded(model.config) != model.config)
    adapters = joined_adapters(model, name)
    if any(adapter.magnitude is not None for adapter in adapters.values()):
        raise UserError("Cannot write an adapter with DoRA, which llama.cpp does not support: merge it instead")
    if "embed" in adapters and model.config.tied:
        raise UserError(
            "Cannot write the adapter of an embedding that is also the head in the format of llama.cpp: merge it"
        )
    left, tensors = {*adapters}, dict[str, Tensor]()
    alpha = alpha_of(adapters)
    for their, ours, _, back in rows(kind, model.config, plain):
        own = [adapters.get(one.removesuffix(".weight")) for one in ours]
        if not any(own):
            continue
        left -= {one.removesuffix(".weight") for one in ours}
        if isinstance(their, list) or not applied(their, isinstance(kind, LatentArchitecture)):
            raise UserError(f"Cannot write the adapter of {ours[0]}, which llama.cpp does not apply: merge it instead")
        shape, sizes = plain[ours[0]].shape, [plain[one].shape[-2] for one in ours]
        if their == EMBEDDING:
            a, b = factors(own, [shape[-1]], alpha)
            a = a.T.contiguous()
        elif len(shape) == 2 and not moves_rows(back, sum(sizes)):
            raise UserError(
                f"Cannot write the adapter of {ours[0]}, whose columns llama.cpp reorders: merge it instead"
            )
        else:
            a, b = factors(own, sizes, alpha)
            b = b if len(shape) > 2 else back(b)
        tensors |= {f"{their}.lora_a": a, f"{their}.lora_b": b}
    if left:
        raise UserError(
            f"Cannot write the adapter of {min(left)}, which {kind.name} has no tensor for: merge it instead"
        )
    outlines = {
        name: TensorOutline(tuple(t.shape), type_of(name, tuple(t.shape), "F32")) for name, t in tensors.items()
    }
    keys: dict[str, Any] = {
        "general.architecture": kind.name,
        "general.type": "adapter",
        "general.name": file_name,
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    if not dry:
        write_gguf(path, keys, outlines, tensors.items())
    return outlines


def check(model: Decoder, name: str, folded: bool) -> None:
    """Raise a UserError if an adapter has parts that GGUF cannot store."""
    if folded:
        raise UserError(
            "Cannot write an adapter of this model as GGUF, because its weights differ from those of the model's GGUF "
            "file: merge the adapter instead"
        )
    if token_rows(model, name) is not None:
        raise UserError("Cannot write an adapter with trained rows of new tokens as GGUF: merge it instead")
    if head_labels(model):
        raise UserError(
            "Cannot write a classifier's adapter as GGUF, because llama.cpp reads no heads of adapters: keep the folder"
        )
    if full := [one for one, p in model.named_parameters() if p.requires_grad and "_lora." not in one]:
        raise UserError(f"Cannot write the fully trained {full[0]} into an adapter of llama.cpp: merge it instead")


def applied(their: str, latent: bool) -> bool:
    """Whether llama.cpp applies an adapter of a tensor."""
    return their in (EMBEDDING, HEAD) or bool(APPLIED.fullmatch(their) and not (latent and LATENT.fullmatch(their)))


def alpha_of(adapters: Mapping[str, Adapter]) -> float:
    """The alpha for which the most adapters have the scaling alpha / R; 1.0 instead of 0."""
    alphas = [adapter.scaling * adapter.factors()[0].size(-2) for adapter in adapters.values()]
    return max(alphas, key=alphas.count) or 1.0


def factors(own: list[Adapter | None], sizes: list[int], alpha: float) -> tuple[Tensor, Tensor]:
    """The factors A (..., R, I) and B (..., O, R) of tensors that are joined along rows (`sizes`: the number of rows of
    each); ranks are added, and scalings other than alpha / R are multiplied into B."""
    parts = [one.factors() if one else None for one in own]
    first = next(part for part in parts if part)
    rank = sum(part[0].size(-2) for part in parts if part)
    a = torch.cat([part[0] for part in parts if part], -2)
    b = first[1].new_zeros(*first[1].shape[:-2], sum(sizes), rank)
    row = column = 0
    for one, part, size in zip(own, parts, sizes):
        if one and part:
            width = part[0].size(-2)
            b[..., row : row + size, column : column + width] = part[1] * (one.scaling * rank / alpha)
            column += width
        row += size
    return a.detach().float().cpu(), b.detach().float().cpu()
