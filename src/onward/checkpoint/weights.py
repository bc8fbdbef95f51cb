"""Tensors on disk: safetensors files, alone or as the shards of an index, read piece by piece."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onward.errors import UserError
from onward.files import read_json, written_whole

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OURS = r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"  # the files that hold a model's weights
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in FLOATS.items()} | {torch.uint8: "U8", torch.int64: "I64", torch.bool: "BOOL"}
AT_ONCE = 1 << 23  # bytes that are copied at a time
ALIGNED = 64  # bytes, as torch does: elsewhere products round otherwise and may take 1.4 times as long


@dataclass(frozen=True)
class Stored:
    """A tensor that is still on disk."""

    shape: list[int]
    dtype: str  # as safetensors calls it
    rows: Callable[[int, int], Tensor]  # from, to: a part of it, to be copied at once and let go
    mapped: Callable[[], Tensor] | None = None  # all of it, mapped into memory; None: it has to be worked out


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of the model in a folder, by their names; nothing but headers is read.

    A UserError if a file is missing, cut off or not a safetensors file, or the index contradicts its shards.
    """
    index = folder / INDEX
    if (folder / SINGLE).exists() or not index.exists():
        return File(folder / SINGLE).tensors()
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{index} has no weight_map, which says what is where: copy or download it again")
    shards: dict[str, dict[str, Stored]] = {}
    for name, shard in places.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,200}\.safetensors", shard):
            raise UserError(f"{index} places {name} in {shard!r:.99}, which is no safetensors file of its folder")
        if shard not in shards:
            if not (folder / shard).exists():
                raise UserError(f"there is no {shard} in {folder}, which {INDEX} names: copy or download it")
            shards[shard] = File(folder / shard).tensors()
        if name not in shards[shard]:
            raise UserError(f"{INDEX} places {name} in {shard}, which has no such tensor: download both again")
    return {name: shards[shard][name] for name, shard in places.items()}


class File:
    """A safetensors file through two handles: one that tensors stay mapped by, and one for those that are copied,
    which is let go now and then so that the pages it has touched do not count beside the copies."""

    def __init__(self, path: Path) -> None:
        self.path, self.lasting, self.passing, self.touched = path, opened(path), opened(path), 0

    def tensors(self) -> dict[str, Stored]:
        found = {}
        for name in self.lasting.keys():  # noqa: SIM118
            header = self.lasting.get_slice(name)
            mapped = partial(self.lasting.get_tensor, name)
            found[name] = Stored(header.get_shape(), header.get_dtype(), partial(self.rows, name), mapped)
        return found

    def rows(self, name: str, start: int, end: int) -> Tensor:
        if self.touched >= AT_ONCE:
            self.passing, self.touched = opened(self.path), 0
        part: Tensor = self.passing.get_slice(name)[start:end]
        self.touched += part.nbytes
        return part


def opened(path: Path) -> Any:
    """A handle of a safetensors file, whose header has been checked."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"there is no {path.name} in {path.parent}: name a folder that holds a model") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is cut off or not a safetensors file ({error}): copy or download it again") from None


def refuse_pickles(folder: Path) -> None:
    """A UserError where a model is there, but only as pickles."""
    if folder.is_dir() and not any((folder / name).exists() for name in (SINGLE, INDEX)):
        found = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    else:
        found = [folder.name] if folder.is_file() and folder.suffix in PICKLES else []
    if found:
        raise UserError(
            f"{found[0]} is a pickle, and reading one can run any code that was put into it: download the model's "
            "safetensors files, or, if you trust this one, have transformers load and save it"
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped into memory; a UserError if it is missing, cut off or not one."""
    file = opened(path)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file, whole or not at all."""
    with written_whole(path) as new:
        fill(new, tensors, tensors.items())


def fill(path: Path, outlines: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors, taken one by one, as a safetensors file; `outlines` tell their shapes and types beforehand.

    They lie at multiples of 64 bytes as far as their sizes allow, so that they can stay mapped when they are read.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(outlines, key=lambda name: outlines[name].nbytes % ALIGNED > 0):
        start, end = end, end + outlines[name].nbytes
        dtype, shape = NAMES[outlines[name].dtype], list(outlines[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def split(tensors: Mapping[str, Tensor], shard_bytes: float) -> dict[str, list[str]]:
    """Which tensors go into which file: in order, no file above `shard_bytes` but for a tensor larger by itself."""
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
