"""Prompts on disk: they are found again, never confused, and continue as if they had just been prefilled."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onward import BlockManager, CacheManager, Decoder, KVCache, PagedKVCache, UserError
from onward.generation import PrefixFiles

from support.decoders import DECODERS, LENGTH, assert_close, decoder, token_ids
from support.devices import device
from support.disk import with_room_for
from support.grids import thinned

NAMES = "llama", "gemma2", "everything about scores", "deepseek", "scaled turns"
CHUNK = 3
CACHES: dict[str, Callable[[Decoder], CacheManager]] = {
    "contiguous": lambda model: CacheManager(KVCache(model.config, 2, LENGTH, CHUNK, device=device())),
    "growing": lambda model: CacheManager(KVCache(model.config, 2, LENGTH, CHUNK, step=2, device=device())),
    "paged": lambda model: BlockManager(
        PagedKVCache(model.config, 2, LENGTH, CHUNK, blocks=20, block_size=2, device=device())
    ),
    "quantized": lambda model: CacheManager(KVCache(model.config, 2, LENGTH, CHUNK, quantized=True, device=device())),
    "quantized, paged": lambda model: BlockManager(
        PagedKVCache(model.config, 2, LENGTH, CHUNK, blocks=20, block_size=2, quantized=True, device=device())
    ),
}
TEXT = token_ids(DECODERS["llama"], 1)[0].tolist()


def feed(model: Decoder, manager: CacheManager, row: int, tokens: list[int], start: int | None) -> torch.Tensor:
    """The logits (T, V) of the tokens from `start` on, in chunks."""
    assert start is not None
    out = []
    for begin in range(start, len(tokens), CHUNK):
        end = min(begin + CHUNK, len(tokens))
        assert manager.reserve(row, begin, end)
        where = torch.arange(begin, end)[None]
        out.append(model(torch.tensor([tokens[begin:end]]), where, manager.cache.view(row, row + 1))[0])
    return torch.cat(out)


def load(files: PrefixFiles, manager: CacheManager, row: int, tokens: list[int], rope_length: int) -> int:
    """The number of tokens of a row that come from the files and the manager's own blocks."""
    found = manager.allocate(row, tokens, rope_length)
    assert found is not None
    return files.load(manager, row, tokens, rope_length, found)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., PrefixFiles]:
    """Return a function that prefills TEXT up to a length into a new cache and stores the prefix in the folder."""

    @torch.inference_mode()
    def made(model: Decoder, kind: str = "contiguous", length: int = 9) -> PrefixFiles:
        prompts, cache = PrefixFiles(tmp_path, model), CACHES[kind](model)
        held = load(prompts, cache, 1, TEXT[:length], LENGTH)
        feed(model, cache, 1, TEXT[:length], held)
        prompts.save(cache, 1, TEXT[:length])
        return prompts

    return made


@pytest.mark.parametrize(("length", "name", "kind"), thinned([1, 4, 8, 9], NAMES, list(CACHES), times=2))
@torch.inference_mode()
def test_saved_prompt_continues_as_if_just_prefilled(
    name: str, kind: str, length: int, read: Callable[..., PrefixFiles]
) -> None:
    model = decoder(DECODERS[name])
    prompts, wanted = read(model, kind, length), feed(model, CACHES[kind](model), 0, TEXT, 0)
    for tokens, found in (TEXT, length), (TEXT[:length], length - 1):
        cache = CACHES[kind](model)
        held = load(prompts, cache, 1, tokens, LENGTH)
        assert held == found
        assert_close(feed(model, cache, 1, tokens, held), wanted[held : len(tokens)])
        cache.register_prefix(1, tokens)
        for end in range(1, len(tokens)):  # other rows may share blocks loaded from disk
            start = cache.allocate(0, TEXT[: end + 1], LENGTH)
            assert_close(feed(model, cache, 0, TEXT[: end + 1], start), wanted[start : end + 1])
    other = [*TEXT[: length - 1], (TEXT[length - 1] + 1) % 13, 0]
    assert load(prompts, CACHES[kind](model), 1, other, LENGTH) == 0


@torch.inference_mode()
def test_longest_matching_file_is_loaded(read: Callable[..., PrefixFiles]) -> None:
    model = decoder(DECODERS["gemma2"])
    for length in 4, 9, 6:
        prompts = read(model, "paged", length)
    assert load(prompts, CACHES["paged"](model), 0, TEXT[:8], LENGTH) == 6


def test_files_of_other_weights_configs_or_caches_are_not_found(read: Callable[..., PrefixFiles]) -> None:
    model = decoder(DECODERS["scaled turns"])
    prompts = read(model)

    def found(kind: str = "contiguous", rope_length: int = LENGTH) -> int | None:
        return load(prompts, CACHES[kind](model), 0, TEXT, rope_length)

    assert found() == found("growing") == 9
    assert found("paged") == found("quantized") == 0
    assert found(rope_length=LENGTH - 1) == 0  # the rotations depend on rope_length
    other = PrefixFiles(prompts.folder, decoder(DECODERS["llama"]))
    assert load(other, CACHES["contiguous"](other.model), 0, TEXT, LENGTH) == 0
    for held in 0, 9:
        model.blocks[1].mlp.down.weight.detach()[0, 0] *= -1
        assert found() == held


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "a bit flipped": flip,
    "another's": lambda path: path.write_bytes(max(path.parent.iterdir(), key=lambda p: p != path).read_bytes()),
    "no file": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
@torch.inference_mode()
def test_damaged_file_is_skipped_and_rewritten(damage: str, read: Callable[..., PrefixFiles]) -> None:
    model = decoder(DECODERS["llama"])
    prompts = read(model, length=9)
    (path,) = prompts.folder.iterdir()
    read(model, length=6)
    DAMAGES[damage](path)
    cache = CACHES["contiguous"](model)
    assert load(prompts, cache, 0, TEXT, LENGTH) == 6
    if path.is_file():
        read(model, length=9)
        assert load(prompts, cache, 0, TEXT, LENGTH) == 9


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"Cannot keep prompts in .*prompts: Not a directory; name another folder"):
        PrefixFiles(tmp_path / "file" / "prompts", decoder(DECODERS["llama"]))


def test_full_disk_is_a_user_error_and_leaves_no_file(tmp_path: Path) -> None:
    model = decoder(DECODERS["llama"])
    cache = CACHES["contiguous"](model)
    with with_room_for(100), pytest.raises(UserError, match="cannot write"):
        PrefixFiles(tmp_path, model).save(cache, 0, TEXT)
    assert list(tmp_path.iterdir()) == []


def test_files_are_bounded_and_private_and_pipes_are_not_opened(read: Callable[..., PrefixFiles]) -> None:
    model = decoder(DECODERS["llama"])
    prompts = read(model, length=9)
    (path,) = prompts.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    read(model, length=8)
    prompts.size = 2 * path.stat().st_size
    prompts.make_room(prompts.size)
    assert [*prompts.folder.iterdir()] == []
    os.mkfifo(path)
    assert load(prompts, CACHES["contiguous"](model), 0, TEXT, LENGTH) == 0, "loading does not wait for a writer"
