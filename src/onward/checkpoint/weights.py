"""Reads and writes safetensors files, single or as the shards of an index, in pieces."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onward.base.errors import UserError
from onward.base.files import read_json
from onward.families._needed import needed
from onward.hub.names import INDEX, SINGLE

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in FLOATS.items()} | {
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
COPY_BYTES = 1 << 23  # bytes copied at a time
ALIGNMENT = 64  # bytes, as torch allocates: without it matmuls round differently and may take 1.4 times as long


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk that is read on request."""

    shape: list[int]
    dtype: str  # name of the dtype in safetensors
    rows: Callable[[int, int], Tensor]  # (start, end): returns these rows; copy and release them at once
    mapped: Callable[[], Tensor] | None = None  # all rows, memory-mapped; None: the rows must be computed
    quantized: Callable[[int, int], tuple[Tensor, Tensor]] | None = (
        None  # integers and scales of rows, if Onward computes with them
    )


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """A model's tensors, to be read on request; reads headers only. Files without tensors of the text decoder may be
    absent."""
    index = folder / INDEX
    if (folder / SINGLE).exists() or not index.exists():
        return SafetensorsFile(folder / SINGLE).tensors()
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} has no weight_map, the table of tensors and their files: copy or download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,200}\.safetensors", shard):
            raise UserError(f"{index} maps {name} to {shard!r:.99}, which is not a safetensors file in its folder")
    shards: dict[str, dict[str, StoredTensor]] = {}
    absent = {shard for shard in weight_map.values() if not (folder / shard).exists()}
    if absent and (folder / "config.json").exists():
        wanted = needed(read_json(folder / "config.json"), weight_map)
        weight_map = {name: shard for name, shard in weight_map.items() if name in wanted or shard not in absent}
    for name, shard in weight_map.items():
        if shard not in shards:
            if not (folder / shard).exists():
                raise UserError(f"there is no {shard} in {folder}, which {INDEX} names: copy or download it")
            shards[shard] = SafetensorsFile(folder / shard).tensors()
        if name not in shards[shard]:
            raise UserError(f"{INDEX} maps {name} to {shard}, which has no such tensor: download both again")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


class SafetensorsFile:
    """A file opened twice: for tensors that stay memory-mapped, and for tensors that are copied. The second handle is
    reopened after every COPY_BYTES, which releases the memory pages that it has touched."""

    def __init__(self, path: Path) -> None:
        self.path, self.lasting, self.passing, self.touched = path, open_file(path), open_file(path), 0

    def tensors(self) -> dict[str, StoredTensor]:
        result = {}
        for name in self.lasting.keys():  # noqa: SIM118
            header = self.lasting.get_slice(name)
            mapped = partial(self.lasting.get_tensor, name)
            result[name] = StoredTensor(header.get_shape(), header.get_dtype(), partial(self.rows, name), mapped)
        return result

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows [start, end), to be copied before the next call."""
        if self.touched >= COPY_BYTES:
            self.passing, self.touched = open_file(self.path), 0
        part: Tensor = self.passing.get_slice(name)[start:end]
        self.touched += part.nbytes
        return part


def open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"there is no {path.name} in {path.parent}: name a folder that holds a model") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is cut off or not a safetensors file ({error}): copy or download it again") from None


def refuse_pickles(folder: Path) -> None:
    """Refuse weights that exist only as pickles, which can run any code."""
    if folder.is_dir() and not any((folder / name).exists() for name in (SINGLE, INDEX)):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    else:
        pickles = [folder.name] if folder.is_file() and folder.suffix in PICKLES else []
    if pickles:
        raise UserError(
            f"Cannot read {pickles[0]}, because it is a pickle, which can run any code: download the model's "
            "safetensors files, or convert a pytorch_model.bin with "
            f"onward convert {shlex.quote(str(folder))} OUT --from-bin"
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file by name, memory-mapped. Raises a UserError if it is missing, cut off or in
    another format."""
    file = open_file(path)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def fill(
    path: Path, outlines: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], *, new: bool = True
) -> None:
    """Write tensors one by one to a safetensors file; `outlines` has the shapes and dtypes of all, for the header.

    Tensors start at multiples of 64 bytes as far as their sizes allow, so that a reader can memory-map them. Without
    `new`, the file must exist with its header, and these tensors are written into it: several processes may do so."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(outlines, key=lambda name: outlines[name].nbytes % ALIGNMENT > 0):
        start, end = end, end + outlines[name].nbytes
        dtype, shape = DTYPE_NAMES[outlines[name].dtype], list(outlines[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb" if new else "r+b") as file:
        if new:
            file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def split(tensors: Mapping[str, Tensor], shard_bytes: float) -> dict[str, list[str]]:
    """Distribute tensors over files, in order: {file: names}. No file exceeds `shard_bytes` unless a single tensor
    does."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}
