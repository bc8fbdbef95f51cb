"""Prefilled prompts on disk: one file per prompt, named by a hash of its tokens."""

from __future__ import annotations

import hashlib
import os
import warnings
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
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

SUFFIX = ".safetensors"
SIZE = 10 << 30  # maximum number of bytes of all files, by default
STATE = "state."  # prefix of state names in a file


class PrefixFiles:
    """A folder of prefilled prompts of one model, which a PrefixCache loads after a restart. Each file holds the keys
    and values of one cache row, and the states after its last token, as safetensors.

    A file's name is a hash of the tokens, a key that names the model and its adapter, the config, and the dtypes and
    shapes of the cache's entries. The key is by default the model's fingerprint, a hash of its structure and weights. A
    file is written atomically, is readable by its owner only, and has a checksum; damaged files and files under a wrong
    name are ignored. If the files have more than `size` bytes together, the least recently used files are removed.
    """

    def __init__(self, folder: Path, model: Decoder, size: int = SIZE) -> None:
        self.folder, self.model, self.size = folder, model, size
        self.sizes, self.changed = dict[str, int](), 0  # sizes at the last listing; modification time of the folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot keep prompts in {folder}: {error.strerror}; name another folder") from None

    def list(self) -> dict[str, int]:
        """Return the size in bytes of each file by name, least recently used first. The folder is listed again only if
        something else changed it."""
        try:
            changed = os.stat(self.folder).st_mtime_ns
        except OSError:
            changed = 0
        if changed != self.changed:
            found = []
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.folder) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIX) and entry.is_file():  # a pipe would wait for a writer
                        status = entry.stat()
                        found.append((status.st_mtime, entry.name.removesuffix(SUFFIX), status.st_size))
            self.sizes, self.changed = {name: size for _, name, size in sorted(found)}, changed
        return self.sizes

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def read(self, name: str) -> dict[str, Tensor] | None:
        """Return the vectors in a prompt's file, and mark it as just used; None if it is missing or damaged."""
        vectors = read(self.path(name)) if name in self.list() else None
        if vectors is None:
            self.sizes.pop(name, None)
        else:
            self.sizes[name] = self.sizes.pop(name)
            with suppress(OSError):
                os.utime(self.path(name))
        return vectors

    def make_room(self, size: int) -> None:
        """Remove the least recently used files, until `size` more bytes fit."""
        total = sum(self.list().values()) + size
        while self.sizes and total > self.size:
            name = next(iter(self.sizes))
            total -= self.sizes.pop(name)
            with suppress(OSError):
                self.path(name).unlink()

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
        `cached` tokens already; if no file has a longer prefix, nothing is loaded. Returns the number of leading tokens
        that the row then holds, always fewer than all. `rope_length` is the row's; `key` identifies the model and the
        adapter, by default the current model."""
        names, saved = self.list(), []
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
            vectors = self.read(name)
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
        """Save a prompt as `save` does, but warn if the file cannot be written."""
        try:
            self.save(manager, row, tokens, key)
        except UserError as error:
            warnings.warn(f"the prompt is not saved: {error}", stacklevel=3)

    def save(self, manager: CacheManager, row: int, tokens: Sequence[int], key: str | None = None) -> Path:
        """Save the keys and values of the first tokens of a cache row, `tokens`, to a file, and return its path. The
        row may hold at most `chunk` further tokens, which are not saved. `key` identifies the model and the adapter, by
        default the current model.

        Raises a UserError if the file cannot be written, if the weights have changed in a way that PyTorch does not
        track, or if no key is given and the model has hooks or edits.
        """
        if (key := key or fingerprint(self.model)) is None:
            raise UserError("Cannot save prompts of this model, because it has hooks or edits: remove them")
        state = self.name_hash(manager, int(manager.cache.rope_length[row]), key)
        state.update(array("q", tokens))
        name = state.hexdigest()
        if self.read(name) is None:
            if key.partition(" ")[0] != fingerprint(self.model):  # another process would load stale keys
                raise UserError("the weights have changed in a way that PyTorch does not track (`data`): prefill again")
            states = manager.cache.states.snapshot(row, len(tokens))
            vectors = manager.dump(row, len(tokens)) | {STATE + name: t for name, t in states.items()}
            vectors = {name: t.cpu() for name, t in vectors.items()}
            content = save(vectors, {"sha256": checksum(name, vectors)})
            self.make_room(len(content))
            with atomic_write(self.path(name)) as new:
                new.touch(0o600)
                new.write_bytes(content)
            self.sizes[name], self.changed = len(content), os.stat(self.folder).st_mtime_ns
        return self.path(name)

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
    """Read the tensors in the file of a prefilled prompt, by name. Returns None if the file is missing, damaged, or was
    saved under another name."""
    if not path.is_file():  # a pipe would wait for a writer
        return None
    try:
        with safe_open(path, framework="pt") as file:
            vectors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            expected = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError):
        return None
    return vectors if expected == checksum(path.stem, vectors) else None
