"""Reads, splits and rewrites GGUF files."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from onward.checkpoint.gguf.blocks import CODES, TYPES
from onward.checkpoint.gguf.header import read_header
from onward.checkpoint.gguf.writer import TensorOutline, write_gguf


def tensor(file: Path, name: str) -> torch.Tensor:
    """The dequantized values of a tensor in a GGUF file."""
    info = read_header(file).tensors[name]
    raw = np.fromfile(file, np.uint8, info.nbytes, offset=info.offset)
    return info.type.decode(raw).view(info.shape)


def split_in_two(file: Path, folder: Path) -> Path:
    """Split a GGUF file into two files, the first with the keys; return the path of the first."""
    header = read_header(file)
    names = list(header.tensors)
    paths = [folder / f"{file.stem}-{number:05}-of-00002.gguf" for number in (1, 2)]
    for path, part, keys in zip(paths, (names[:5], names[5:]), (dict(header.keys), {})):
        outlines = {name: TensorOutline(header.tensors[name].shape, header.tensors[name].type) for name in part}
        write_gguf(path, keys | {"split.count": 2}, outlines, [(name, tensor(file, name)) for name in part])
    return paths[0]


def rewritten(file: Path, out: Path, keys: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Copy a GGUF file with additional keys and tensors; `keys` are keys of the architecture without its prefix."""
    header = read_header(file)
    own = {f"{header.architecture}.{name}": value for name, value in keys.items()}
    named = {name: tensor(file, name) for name in header.tensors} | (tensors or {})
    kinds = {name: info.type for name, info in header.tensors.items()}
    plain = TYPES[CODES["F32"]]
    outlines = {name: TensorOutline(tuple(t.shape), kinds.get(name, plain)) for name, t in named.items()}
    write_gguf(out, {**header.keys, **own}, outlines, named.items())
    return out
