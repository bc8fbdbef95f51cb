"""The tensors in which a quantized weight is stored, and helpers to read them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.weights import FLOATS, StoredTensor

Parts = Mapping[str, StoredTensor]  # by the ending of the tensor's name
Config = Mapping[str, Any]  # the quantization_config


def refusal(name: str, packed: StoredTensor, scales: StoredTensor, kind: str) -> UserError:
    return UserError(
        f"{name} is stored as {packed.dtype} of {packed.shape} with scales {scales.dtype} of {scales.shape}, which is "
        f"not {kind}: get the files or the config.json again"
    )


def whole(tensor: StoredTensor) -> Tensor:
    """All elements, memory-mapped if possible."""
    return tensor.mapped() if tensor.mapped else tensor.rows(0, tensor.shape[0])


def half(*tensors: StoredTensor) -> str:
    """The dtype of a dequantized weight: fp16 if its scales are in fp16, otherwise bf16."""
    return next((tensor.dtype for tensor in tensors if tensor.dtype == "F16"), "BF16")


def is_float(*tensors: StoredTensor) -> bool:
    return all(tensor.dtype in FLOATS for tensor in tensors)


def fields(words: Tensor, bits: int, dim: int) -> Tensor:
    """The unsigned integers of 2, 4 or 8 bits in int32 words, which follow each other along `dim` from the lowest bits
    of a word to its highest."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32).view(-1, *[1] * (words.ndim - 1 - dim))
    return (words.unsqueeze(dim + 1) >> shifts & ((1 << bits) - 1)).flatten(dim, dim + 1)
