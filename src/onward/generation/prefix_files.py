"""Prompts kept on disk: one file per prompt, found again by the tokens a later prompt begins with."""

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
from onward.generation.cache_manager import CacheManager, rope_key
from onward.model.decoder import Decoder


class PrefixFiles:
    """Rows of caches of one model in a folder, as safetensors: the backend of a PrefixCache that outlives the program.

    A file's name is a hash of the tokens, the weights, the config and the form of the cache's entries. A file is
    written whole or not at all and holds a checksum; one that is damaged, or is not what its name says, is passed
    over. Files are never removed.
    """

    def __init__(self, folder: Path, model: Decoder) -> None:
        self.folder, self.model = folder, model
        self.hashed: tuple[list[tuple[int, int, int]], bytes] = [], b""  # a state of the weights and its hash

    def load(self, manager: CacheManager, row: int, tokens: Sequence[int], rope_length: int, found: int) -> int:
        """Fill an allocated row, which holds the first `found` tokens, from the longest file that these tokens begin
        with; returns how many of the tokens the row holds then, always fewer than all."""
        names, saved = {path.stem for path in self.folder.glob("*.safetensors")}, []
        if not names:
            return found
        state = self.name_hash(manager, rope_length)
        for n, token in enumerate(tokens, 1):
            state.update(array("q", [token]))
            if min(n, len(tokens) - 1) > found and state.hexdigest() in names:
                saved.append((n, state.hexdigest()))
        chunk = manager.cache.chunk
        for n, name in reversed(saved):
            vectors = read(self.folder / f"{name}.safetensors")
            if vectors is None:
                continue
            starts = *range(found, n, chunk), n - 1
            if not all(manager.reserve(row, start, min(n, start + chunk)) for start in starts):
                return manager.allocate(row, tokens, rope_length) or 0
            manager.load(row, n, vectors)
            manager.register_prefix(row, tokens[:n])
            return min(n, len(tokens) - 1)
        return found

    def save(self, manager: CacheManager, row: int, tokens: Sequence[int]) -> Path:
        """Keep a row that holds these tokens and no more than a chunk beyond them; returns its file."""
        state = self.name_hash(manager, int(manager.cache.rope_length[row]))
        state.update(array("q", tokens))
        path = self.folder / f"{state.hexdigest()}.safetensors"
        if read(path) is None:
            vectors = {name: t.cpu() for name, t in manager.dump(row, len(tokens)).items()}
            with written_whole(path) as new:
                new.write_bytes(save(vectors, {"sha256": checksum(path.stem, vectors)}))
        return path

    def name_hash(self, manager: CacheManager, rope_length: int) -> hashlib._Hash:
        """The state of a file name's hash before the tokens."""
        config, layers = self.model.config, manager.cache.layers
        kinds = [(name, t.dtype, t.shape[2:]) for layer in layers for name, t in layer.entries.items()]
        made_for = config, kinds, manager.block_size, self.weights(), rope_key(config, rope_length)
        return hashlib.sha256(repr(made_for).encode())

    def weights(self) -> bytes:
        """A hash of all weights, computed again when one of them has changed."""
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
    """A hash of the name and the tensors that a file of this name holds."""
    digest = hashlib.sha256(name.encode())
    for key in sorted(vectors):
        digest.update(key.encode())
        digest.update(raw(vectors[key]))
    return digest.hexdigest()


def read(path: Path) -> dict[str, Tensor] | None:
    """The tensors of a file, or None where it is missing, damaged, or holds those of another name."""
    try:
        with safe_open(path, framework="pt") as file:
            vectors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            wanted = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError):
        return None
    return vectors if wanted == checksum(path.stem, vectors) else None
