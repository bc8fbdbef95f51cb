"""Writes a GGUF file atomically, tensor by tensor."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.base.files import atomic_write
from onward.checkpoint.gguf.blocks import CODES, TYPES, BlockType
from onward.checkpoint.gguf.header import ALIGNMENT, ARRAY, MAGIC, STRING, VERSION

FILLER = {"onward.alignment": 64}  # a key of 32 bytes, added so that the tensors begin at a multiple of 64
PIECE = 1 << 22  # numbers encoded at a time
K_TYPES = "Q4_K", "Q5_K", "Q6_K"
UNQUANTIZED = "altup", "laurel", "per_layer_model_proj"  # tensors that llama-quantize does not quantize
HALF = torch.finfo(torch.float16).max  # every type can store numbers below this
SCALAR = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}  # GGUF's type and format of a value, by Python type
ELEMENT = {bool: (7, np.bool_), int: (5, np.int32), float: (6, np.float32)}


@dataclass(frozen=True)
class TensorOutline:
    shape: tuple[int, ...]
    type: BlockType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.numbers * self.type.bytes


def write_gguf(
    path: Path,
    keys: Mapping[str, Any],
    outlines: Mapping[str, TensorOutline],
    tensors: Iterable[tuple[str, Tensor]],
    progress: Callable[[int], object] = lambda done: None,
    columns: Mapping[str, Tensor] = {},  # only read, so a shared default is safe
) -> None:
    """Write metadata keys and tensors; `outlines` gives the shapes and types of the tensors in the same order, and
    `columns` the importance of the columns of tensors with K types. If a number does not fit into the type of its
    tensor, a file at `path` stays unchanged."""
    infos, start = b"", 0
    for name, outline in outlines.items():
        infos += text(name) + struct.pack(f"<I{len(outline.shape)}Q", len(outline.shape), *outline.shape[::-1])
        infos += struct.pack("<IQ", CODES[outline.type.name], start)
        start += -(-outline.nbytes // ALIGNMENT) * ALIGNMENT
    header = header_of(keys, len(outlines)) + infos
    if -len(header) % (2 * ALIGNMENT) >= ALIGNMENT:  # torch is faster on tensors mapped with this alignment
        header = header_of({**keys, **FILLER}, len(outlines)) + infos
    with atomic_write(path) as new, new.open("wb") as file:
        file.write(header)
        done = 0
        for (name, outline), (its, tensor) in zip(outlines.items(), tensors, strict=True):
            assert (name, outline.shape) == (its, tuple(tensor.shape)), (name, its, outline.shape, tensor.shape)
            pad(file)
            for start, piece in enumerate(tensor.detach().reshape(-1).split(PIECE)):
                weights = along(columns.get(name), outline, start * PIECE, piece.numel())
                raw = encoded(piece.cpu(), outline.type, name, weights)
                file.write(raw.data)
                progress(done := done + raw.nbytes)
        pad(file)


def header_of(keys: Mapping[str, Any], count: int) -> bytes:
    """The bytes before the list of tensors."""
    pairs = b"".join(text(name) + typed(value) for name, value in keys.items())
    return MAGIC + struct.pack("<IQQ", VERSION, count, len(keys)) + pairs


def along(columns: Tensor | None, outline: TensorOutline, start: int, count: int) -> np.ndarray | None:
    """The importance of `count` numbers of a tensor from number `start` on, if its type takes weights."""
    if columns is None or outline.type.name not in K_TYPES or len(columns) != outline.shape[-1]:
        return None
    return np.resize(np.roll(columns.numpy(), -start), count)


def encoded(piece: Tensor, kind: BlockType, name: str, columns: np.ndarray | None = None) -> np.ndarray:
    raw = kind.encode(piece, columns)
    small = not piece.numel() or max(map(abs, torch.stack(piece.aminmax()).tolist())) < HALF  # false for NaN
    if not (small or kind.name == "F32" or kind.decode(raw).isfinite().all()) and piece.isfinite().all():
        raise UserError(
            f"tensor {name} has a number as large as {piece.abs().max().item():.3g}, which {kind.name} cannot hold: "
            "write --dtype bf16 or f32"
        )
    return raw


def pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def text(value: str) -> bytes:
    """Length, then UTF-8."""
    raw = value.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    """Type code, then the value."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if not isinstance(value, list):
        code, kind = SCALAR[type(value)]
        return struct.pack(f"<I{kind}", code, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))
    code, dtype = ELEMENT[type(value[0])]
    return struct.pack("<IIQ", ARRAY, code, len(value)) + np.array(value, dtype).tobytes()


def type_of(name: str, shape: tuple[int, ...], wanted: str) -> BlockType:
    """The type that llama.cpp gives a tensor in a file of type `wanted`: F32 for vectors and some small matrices, a
    finer type if blocks do not divide the rows."""
    small = (
        "ffn_gate_inp.",
        "ffn_gate_inp_shexp.",
        "position_embd.",
        "rope_f",
        "attn_sinks.",
        "ssm_conv1d",
        "shortconv.conv.",
        "altup_correct_coef",
        "altup_predict_coef",
    )
    plain = len(shape) < 2 or name.endswith("_norm.weight") or not name.endswith(".weight")
    if plain or any(part in name for part in small):
        return TYPES[CODES["F32"]]
    finest = [wanted, "Q8_0", "F16"] if wanted in K_TYPES else [wanted, "F16"]
    if TYPES[CODES[wanted]].numbers > 1 and any(part in name for part in UNQUANTIZED):
        finest = ["F16"]
    return next(kind for name in finest if shape[-1] % (kind := TYPES[CODES[name]]).numbers == 0)
