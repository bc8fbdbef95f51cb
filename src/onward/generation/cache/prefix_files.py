"""Prefilled prompts on disk: one file per prompt, named by a hash of its tokens."""

from __future__ import annotations

import hashlib
import warnings
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from onward.base.errors import UserError
from onward.base.files import atomic_write
from onward.compiled.fingerprint import fingerprint
from onward.generation.cache.manager import CacheManager
from onward.generation.cache.rotations import rope_key
from onward.model.decoder import Decoder

STATE = "state."  # prefix of the names of states


class PrefixFiles:
    """A folder of prefilled prompts of one model, which a PrefixCache loads after a restart. Each file holds the keys
    and values of one cache row, and the states after its last token, as safetensors.

    A file's name is a hash of the tokens, a key that names the model and its adapter, the config, and the dtypes and
    shapes of the cache's entries. The key is by default the model's fingerprint, a hash of its structure and weights. A
    file is written atomically and has a checksum; damaged files and files under a wrong name are ignored. Files are
    never removed.
    """

    def __init__(self, folder: Path, model: Decoder) -> None:
        self.folder, self.model = folder, model

    def load(
        self,
        manager: CacheManager,
        row: int,
        tokens: Sequence[int],
        rope_length: int,
        cached: int,
        key: str | None = None,
    ) -> int:
        """Load the file with the longest prefix of `tokens` into the row `row`, which is allocated and holds the first
        `cached` tokens already; does nothing if no file has a longer prefix. Returns the number of leading tokens that
        the row then holds, always fewer than all. `rope_length` is that of the row; `key` names the model and the
        adapter, by default the model as it is."""
        names, saved = {path.stem for path in self.folder.glob("*.safetensors")}, []
        if not names or (key := key or fingerprint(self.model)) is None:
            return cached
        state = self.name_hash(manager, rope_length, key)
        states = manager.cache.states
        for n, token in enumerate(tokens[:-1] if states else tokens, 1):
            state.update(array("q", [token]))
            if min(n, len(tokens) - 1) > cached and state.hexdigest() in names:
                saved.append((n, state.hexdigest()))
        chunk = manager.cache.chunk
        for n, name in reversed(saved):
            vectors = read(self.folder / f"{name}.safetensors")
            if vectors is None:
                continue
            starts = *range(cached, n, chunk), n - 1
            if not all(manager.reserve(row, start, min(n, start + chunk)) for start in starts):
                return manager.allocate(row, tokens, rope_length, key, 0 if states else None) or 0
            manager.load(row, n, vectors)
            states.restore(row, n, {name.removeprefix(STATE): t for name, t in vectors.items()})
            manager.register_prefix(row, tokens[:n])
            return min(n, len(tokens) - 1)
        return cached

    def keep(self, manager: CacheManager, row: int, tokens: Sequence[int], key: str | None) -> None:
        """Save a prompt as `save` does; warns if the file cannot be written."""
        try:
            self.save(manager, row, tokens, key)
        except UserError as error:
            warnings.warn(f"the prompt is not saved: {error}", stacklevel=3)

    def save(self, manager: CacheManager, row: int, tokens: Sequence[int], key: str | None = None) -> Path:
        """Save the keys and values of the first tokens of a cache row, `tokens`, to a file; returns its path. The row
        may hold at most `chunk` further tokens, which are not saved. `key` names the model and the adapter, by default
        the model as it is.

        Raises a UserError if the file cannot be written, or if no key is given and the model has hooks or edits.
        """
        if (key := key or fingerprint(self.model)) is None:
            raise UserError("the model has hooks or edits: its prompts are not saved")
        state = self.name_hash(manager, int(manager.cache.rope_length[row]), key)
        state.update(array("q", tokens))
        path = self.folder / f"{state.hexdigest()}.safetensors"
        if read(path) is None:
            states = manager.cache.states.snapshot(row, len(tokens))
            vectors = manager.dump(row, len(tokens)) | {STATE + name: t for name, t in states.items()}
            vectors = {name: t.cpu() for name, t in vectors.items()}
            with atomic_write(path) as new:
                new.write_bytes(save(vectors, {"sha256": checksum(path.stem, vectors)}))
        return path

    def name_hash(self, manager: CacheManager, rope_length: int, key: str) -> hashlib._Hash:
        """Return the SHA-256 object for a file name, updated with the config, the cache's layout, the rotary scaling
        for `rope_length` and `key`; the caller adds the tokens."""
        config, layers = self.model.config, manager.cache.layers
        kinds = [(name, t.dtype, t.shape[2:]) for layer in layers for name, t in layer.entries.items()]
        identity = config, kinds, manager.block_size, rope_key(config, rope_length), key
        return hashlib.sha256(repr(identity).encode())


def raw(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def checksum(name: str, vectors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(name.encode())
    for key in sorted(vectors):
        digest.update(key.encode())
        digest.update(raw(vectors[key]))
    return digest.hexdigest()


def read(path: Path) -> dict[str, Tensor] | None:
    """Read the tensors in the file of a prefilled prompt, by name; returns None if the file is missing, damaged, or was
    saved under another name."""
    try:
        with safe_open(path, framework="pt") as file:
            vectors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            expected = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError):
        return None
    return vectors if expected == checksum(path.stem, vectors) else None
