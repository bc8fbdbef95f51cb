"""Reads the tensors of a GGUF file. Tensors that need no computation are memory-mapped; others are dequantized in
pieces while they are copied."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.gguf.header import TensorInfo
from onward.checkpoint.weights import DTYPE_NAMES, StoredTensor

QUANTIZED = torch.bfloat16  # the dtype of dequantized weights, unless another is requested


def stored_tensors(
    tensors: Mapping[str, TensorInfo], shift_of: Callable[[str], float] = lambda name: 0.0
) -> dict[str, StoredTensor]:
    """The file's tensors, to be read on request. `shift_of(name)` is subtracted from a tensor when it is read, in fp32:
    some architectures store the weights of norms with an offset.

    All tensors get the dtype that most elements of the file's matrices have, since GGUF keeps norms and biases in fp32
    in every file."""
    counts = Counter[torch.dtype]()
    for name, info in tensors.items():
        if info.type.plain is None and info.type.dequantize is None:
            raise UserError(
                f"{info.path.name}: tensor {name} is {info.type.name}, which Onward does not read: make a Q8_0 of the "
                f"file with llama-quantize --allow-requantize {info.path.name} OUT.gguf Q8_0"
            )
        counts[info.type.plain or QUANTIZED] += math.prod(info.shape) if len(info.shape) > 1 else 0
    main = max(counts, key=counts.__getitem__, default=torch.float32)
    map_of = cache(open_map)
    result = {}
    for name, info in tensors.items():
        add = -shift_of(name)
        view = partial(mapped, info, map_of) if info.type.plain == main and not add else None
        result[name] = StoredTensor(list(info.shape), DTYPE_NAMES[main], partial(rows, info, add), view)
    return result


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


def open_map(path: Path) -> mmap.mmap:
    """Map a file privately: writes never reach the file."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def mapped(info: TensorInfo, map_of: Callable[[Path], mmap.mmap]) -> Tensor:
    assert info.type.plain is not None
    numbers = math.prod(info.shape)
    return torch.frombuffer(map_of(info.path), dtype=info.type.plain, count=numbers, offset=info.offset).view(
        info.shape
    )


def rows(info: TensorInfo, add: float, start: int, end: int) -> Tensor:
    """Rows [start, end) of a tensor plus `add`; in fp32 if the type is quantized or `add` is not 0."""
    if len(info.shape) < 2:  # a block may cross the bounds of these rows
        raw = np.fromfile(info.path, np.uint8, info.nbytes, offset=info.offset)
        part = info.type.decode(raw).view(info.shape)
        part = part[start:end] if info.shape else part
    else:
        start, end, _ = slice(start, end).indices(info.shape[0])
        each = info.row_bytes
        raw = np.fromfile(info.path, np.uint8, (end - start) * each, offset=info.offset + start * each)
        part = info.type.decode(raw).view(end - start, *info.shape[1:])
    return part.float() + add if add else part
