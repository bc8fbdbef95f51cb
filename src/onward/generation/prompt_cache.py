"""Prompts that have been read, kept on disk: one file per prompt, found again by what it begins with."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from onward.files import written_whole
from onward.model.cache import Cache, rotation_key
from onward.model.decoder import Decoder


class PromptCache:
    """Rows of caches of one model in a folder, as safetensors.

    A file's name is a hash of the tokens, the weights, the config and what the cache keeps of a token. It is written
    whole or not at all and holds a checksum; one that is damaged, or not what its name says, is passed over. Files are
    never removed.
    """

    def __init__(self, folder: Path, model: Decoder) -> None:
        self.folder, self.model = folder, model
        self.hashed: tuple[list[tuple[int, int, int]], bytes] = [], b""  # a state of the weights and its hash

    def open(self, cache: Cache, row: int, tokens: Sequence[int], rope_length: int) -> int | None:
        """As `cache.open`, but tokens may also come from the longest prompt on disk that these begin with."""
        held = cache.open(row, tokens, rope_length)
        names, saved = {path.stem for path in self.folder.glob("*.safetensors")}, []
        if held is None or not names:
            return held
        state = self.beginning(cache, rope_length)
        for n, token in enumerate(tokens, 1):
            state.update(array("q", [token]))
            if min(n, len(tokens) - 1) > held and state.hexdigest() in names:
                saved.append((n, state.hexdigest()))
        for n, name in reversed(saved):
            vectors = read(self.folder / f"{name}.safetensors")
            if vectors is None:
                continue
            starts = *range(held, n, cache.chunk), n - 1
            if not all(cache.extend(row, start, min(n, start + cache.chunk)) for start in starts):
                return cache.open(row, tokens, rope_length)
            cache.load(row, n, vectors)
            cache.commit(row, tokens[:n])
            return min(n, len(tokens) - 1)
        return held

    def save(self, cache: Cache, row: int, tokens: Sequence[int]) -> Path:
        """Keep a row that holds these tokens and no more than a chunk beyond; returns its file."""
        state = self.beginning(cache, int(cache.rope_length[row]))
        state.update(array("q", tokens))
        path = self.folder / f"{state.hexdigest()}.safetensors"
        if read(path) is None:
            vectors = {name: t.cpu() for name, t in cache.dump(row, len(tokens)).items()}
            with written_whole(path) as new:
                new.write_bytes(save(vectors, {"sha256": checksum(path.stem, vectors)}))
        return path

    def beginning(self, cache: Cache, rope_length: int) -> hashlib._Hash:
        """The state of a name's hash before the tokens."""
        config = self.model.config
        kinds = [(name, t.dtype, t.shape[2:]) for store in cache.layers for name, t in store.entries.items()]
        made_for = config, kinds, cache.block_size, self.weights(), rotation_key(config, rope_length)
        return hashlib.sha256(repr(made_for).encode())

    def weights(self) -> bytes:
        """A hash of all weights, worked out again when one of them has changed."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tracked = not any(t.is_inference() for t in tensors)  # those do not tell whether they have changed
        state = [(id(t), t.data_ptr(), t._version) for t in tensors] if tracked else []
        if not tracked or state != self.hashed[0]:
            digest = hashlib.sha256()
            for t in tensors:
                digest.update(raw(t))
            self.hashed = state, digest.digest()
        return self.hashed[1]


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def checksum(name: str, vectors: Mapping[str, Tensor]) -> str:
    """What a file of this name must hold, as a hash."""
    digest = hashlib.sha256(name.encode())
    for key in sorted(vectors):
        digest.update(key.encode())
        digest.update(raw(vectors[key]))
    return digest.hexdigest()


def read(path: Path) -> dict[str, Tensor] | None:
    """What a file holds, or None where it is not there, damaged or another's."""
    try:
        with safe_open(path, framework="pt") as file:
            vectors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            wanted = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError):
        return None
    return vectors if wanted == checksum(path.stem, vectors) else None
