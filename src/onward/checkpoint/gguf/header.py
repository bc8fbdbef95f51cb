"""Reads the header of a GGUF file: its keys and the locations of its tensors. Every count is checked against the size
of the file before anything is allocated. Source: ggml/include/gguf.h of llama.cpp."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from onward.base.arguments import shown
from onward.base.errors import UserError
from onward.checkpoint.gguf.blocks import TYPES, BlockType

# The package `gguf` takes eight seconds for a vocabulary of 128,000 tokens and trusts the counts in a file.
MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is in a GGUF file; its shape is in torch's order."""

    path: Path
    offset: int
    type: BlockType
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of the elements with the same index in the first dimension."""
        return self.nbytes // self.shape[0]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.numbers * self.type.bytes


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file, or of all files of a split model: its metadata keys and its tensors."""

    path: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    values: Mapping[str, Tensor] = field(default_factory=dict)  # values of tensors that are not in the file yet

    @cached_property
    def architecture(self) -> str:
        """The name of the file's architecture in llama.cpp, such as llama."""
        name = self.keys.get("general.architecture")
        if not isinstance(name, str):
            raise UserError(f"{self.path} has no general.architecture, the name of its kind of decoder: get it again")
        return name


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == MAGIC


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file; of a split model, whose first file is `path`, all headers."""
    header = read_one(path)
    count = header.keys.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return header
    match = SPLIT.fullmatch(path.name)
    if not match or int(match[2]) != 1 or int(match[3]) != count:
        raise UserError(f"{path} is one of {count} parts: name the first, which ends in -00001-of-{count:05}.gguf")
    tensors = dict(header.tensors)
    for number in range(2, count + 1):
        part = path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")
        if not part.exists():
            raise UserError(
                f"{path.parent} has no {part.name}, one of the {count} parts of the model: copy or download it"
            )
        for name, info in read_one(part).tensors.items():
            if tensors.setdefault(name, info) is not info:
                raise UserError(f"{part} has a tensor {shown(name)}, which another part also has: get the parts again")
    return Header(path, header.keys, tensors)


def read_one(path: Path) -> Header:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = Reader(path, data)
            return Header(path, *reader.header())
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is empty or cannot be mapped ({error}): copy or download it again") from None


class Reader:
    """Reads consecutive values; `at` is the offset of the next one."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 4, len(data)

    def broken(self, what: str) -> UserError:
        what = what.encode("unicode_escape").decode()  # damaged names may contain any characters
        return UserError(f"{self.path} is cut off or not a GGUF file ({what}): copy or download it again")

    def header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.data[:4] != MAGIC:
            raise self.broken(f"it begins with {bytes(self.data[:4])!r}")
        version = self.number("I")
        if version & 0xFFFF == 0:
            raise UserError(
                f"{self.path} is a big-endian GGUF file, which Onward does not read: get a little-endian file"
            )
        if version not in (2, VERSION):
            raise UserError(
                f"{self.path} is GGUF of version {version}: Onward reads versions 2 and 3, so convert the model again"
            )
        n_tensors, n_keys = self.number("Q"), self.number("Q")
        self.room(n_keys, 8 + 4 + 1, "keys")
        self.room(n_tensors, 8 + 4 + 8 + 4 + 8, "tensors")
        keys: dict[str, Any] = {}
        for _ in range(n_keys):
            name = self.text()
            if keys.setdefault(name, None) is not None:
                raise self.broken(f"the key {name} occurs twice")
            keys[name] = self.value(self.number("I"), name)
        alignment = keys.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 16:
            raise self.broken(f"general.alignment is {alignment!r:.30}")
        outlines = [self.outline() for _ in range(n_tensors)]
        start = -(-self.at // alignment) * alignment
        tensors = {outline[0]: self.placed(*outline, start, alignment) for outline in outlines}
        if len(tensors) < n_tensors:
            raise self.broken("two tensors have the same name")
        return keys, tensors

    def outline(self) -> tuple[str, tuple[int, ...], int, int]:
        """The next entry in the list of tensors: (name, shape in torch's order, type code, offset in the tensor
        data)."""
        name, count = self.text(), self.number("I")
        if count > MOST_DIMENSIONS:
            raise self.broken(f"tensor {name:.60} has {count} dimensions")
        shape = tuple(self.number("Q") for _ in range(count))[::-1]  # GGUF stores the fastest dimension first
        if 0 in shape:
            raise self.broken(f"tensor {name:.60} of {list(shape)} has no numbers")
        return name, shape, self.number("I"), self.number("Q")

    def placed(
        self, name: str, shape: tuple[int, ...], code: int, offset: int, start: int, alignment: int
    ) -> TensorInfo:
        """The location of a tensor from its entry in the list; `offset` counts from `start`, the first byte of tensor
        data."""
        if code not in TYPES:
            raise UserError(
                f"{self.path}: tensor {shown(name)} has type {code}, which Onward does not support: get another file"
            )
        kind, row = TYPES[code], shape[-1] if shape else 1
        if row % kind.numbers:
            raise self.broken(f"tensor {name:.60} has rows of {row} numbers in blocks of {kind.numbers}")
        info = TensorInfo(self.path, start + offset, kind, shape)
        if offset % alignment or info.nbytes > self.size or info.offset + info.nbytes > self.size:
            raise self.broken(f"tensor {name:.60} of {list(shape)} {kind.name} is not all in the file")
        return info

    def room(self, count: int, each: int, what: str) -> None:
        """Raise a UserError if the rest of the file cannot hold `count` values of at least `each` bytes."""
        if count * each > self.size - self.at:
            raise self.broken(f"it announces {count:,} {what}")

    def number(self, kind: str) -> int:
        return int(self.scalar(kind))

    def scalar(self, kind: str) -> Any:
        size = struct.calcsize(f"<{kind}")
        self.room(1, size, "value")
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += size
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.room(length, 1, "bytes of a text")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int, name: str) -> Any:
        """A key's value by its type code: a float as the shortest number that rounds to it, an array as a list."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(name)
        if kind not in SCALARS:
            raise self.broken(f"the key {name:.60} has type {kind}")
        value = self.scalar(SCALARS[kind])
        return float(str(np.float32(value))) if SCALARS[kind] == "f" else value

    def array(self, name: str) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            return self.texts(count)
        if kind not in SCALARS:
            raise self.broken(f"the key {name:.60} is an array of type {kind}")
        dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
        self.room(count, dtype.itemsize, f"values of {name:.60}")
        self.at += count * dtype.itemsize
        return np.frombuffer(self.data, dtype, count, self.at - count * dtype.itemsize).tolist()

    def texts(self, count: int) -> list[str]:
        self.room(count, 8, "texts")
        data, at, size = self.data, self.at, self.size
        length_of: Callable[[Any, int], tuple[int]] = struct.Struct("<Q").unpack_from
        result = []
        for _ in range(count):
            if at + 8 > size:
                raise self.broken("a text is cut off")
            end = at + 8 + length_of(data, at)[0]
            if end > size:
                raise self.broken("a text is cut off")
            result.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self.at = at
        return result
