"""A save that several processes write together, as the files that one process would write.

No process holds all tensors: each is gathered from its parts in turn, and one process keeps it. The first process
creates the files with their headers, each process writes the tensors that it has kept into them, and the first process
completes the folder. The folder therefore does not depend on the number of processes, and any number of processes can
read it. All processes must share one disk.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from onward.base.errors import UserError
from onward.base.files import atomic_write, flush, write_json
from onward.checkpoint.huggingface.save import described
from onward.checkpoint.names import rows, to_theirs
from onward.checkpoint.saves.folder import CONFIG, KINDS, STATE, by_file, write_progress
from onward.checkpoint.weights import SINGLE, fill
from onward.config.decoder import DecoderConfig

NUMBERS = count()  # numbers agreements and saves, equally in all processes


class Writers(Protocol):
    """The processes that write a save together, the store through which they agree, and how they gather the tensors
    that they divide (see parallel/parts.py)."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def store(self) -> distributed.Store | None: ...

    def gathered(self, tensor: Tensor) -> Tensor: ...
    def gathered_parameters(self, model: nn.Module) -> AbstractContextManager[None]: ...


def agree(writers: Writers, folder: Path) -> bool:
    """Whether the save has to be written; the first process checks, and informs the others."""
    key, store = f"needed/{next(NUMBERS)}", writers.store
    assert store is not None
    if not writers.rank:
        store.set(key, "" if folder.exists() else "needed")
    return store.get(key) == b"needed"


class SharedSave:
    """The part of a save that this process writes. All processes construct it at the same time; `write` may then be
    called in a thread. `of_stages` exchanges a value and returns the value of each pipeline stage."""

    def __init__(
        self,
        writers: Writers,
        folder: Path,
        config: DecoderConfig,
        tensors: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
        progress: dict[str, Any],
        hf: Mapping[str, Any],
        of_stages: Callable[[Any], Sequence[Any]],
    ) -> None:
        self.writers, self.folder, self.config, self.progress = writers, folder, config, progress
        self.key = f"save/{next(NUMBERS)}"
        self.average = next((t.dtype for name, t in tensors.items() if name.startswith("average/")), None)
        self.stages = of_stages((outlines(tensors), outlines(frozen)))
        of_trainer, of_frozen = ({n: t for stage in self.stages for n, t in stage[i].items()} for i in (0, 1))
        self.weights, self.state = by_file(of_trainer, of_frozen, self.average)
        self.hf, self.kind = described(config, self.weights, hf, self.weights["embed.weight"].dtype)
        owners, places = self.owners, {name: i for i, name in enumerate([*of_trainer, *of_frozen])}
        own, own_frozen = dict[str, Tensor](), dict[str, Tensor]()
        for kept, name, tensor in [(own, *item) for item in tensors.items()] + [
            (own_frozen, *item) for item in frozen.items()
        ]:
            full, holders = writers.gathered(tensor), self.holders(name)
            if owners.get(name.rpartition("/")[2], holders[places[name] % len(holders)]) == writers.rank:
                kept[name] = full.to("cpu", copy=True)
        self.own_weights, self.own_state = by_file(own, own_frozen, self.average)

    def holders(self, name: str) -> range:
        """The ranks of the first stage that has this tensor or parameter."""
        size = self.writers.count // len(self.stages)
        kinds = "", *KINDS
        stage = next(i for i, s in enumerate(self.stages) if any(kind + name in part for kind in kinds for part in s))
        return range(stage * size, (stage + 1) * size)

    @property
    def owners(self) -> dict[str, int]:
        """The rank that keeps and writes each parameter. Ranks get about the same number of bytes, and parameters that
        the files store as one tensor have one owner."""
        bytes_of = [0] * self.writers.count
        owners: dict[str, int] = {}
        for _, names, _, _ in rows(self.kind, self.config, self.weights):
            least = min(self.holders(names[0]), key=bytes_of.__getitem__)
            bytes_of[least] += sum(self.weights[name].nbytes for name in names)
            owners |= dict.fromkeys(names, least)
        return owners

    @cached_property
    def model(self) -> dict[str, Tensor]:
        """The tensors of the model's file, without data; they define its layout."""
        return dict(to_theirs(self.kind, self.config, self.weights))

    def write(self) -> None:
        """Write this process's tensors. The first process then waits for the others and completes the folder; the
        others wait until it has."""
        store = self.writers.store
        assert store is not None
        if self.writers.rank:
            if begun := store.get(f"{self.key}/folder").decode():
                try:
                    self.write_own(Path(begun))
                    failure = ""
                except (OSError, UserError) as error:
                    failure = f"rank {self.writers.rank}: {getattr(error, 'strerror', None) or error}"
                store.set(f"{self.key}/{self.writers.rank}", failure)
            store.get(f"{self.key}/done")
            return
        ready = False
        try:
            with atomic_write(self.folder) as new:
                new.mkdir()
                fill(new / SINGLE, self.model, ())
                fill(new / STATE, self.state, ())
                store.set(f"{self.key}/folder", str(new.absolute()))
                ready = True
                self.write_own(new)
                failures = [store.get(f"{self.key}/{rank}").decode() for rank in range(1, self.writers.count)]
                if failure := next(filter(None, failures), ""):
                    raise UserError(failure)
                write_json(new / CONFIG, self.hf)
                write_progress(new, self.progress)
        finally:
            if not ready:
                store.set(f"{self.key}/folder", "")
            store.set(f"{self.key}/done", "")

    def write_own(self, new: Path) -> None:
        fill(new / SINGLE, self.model, to_theirs(self.kind, self.config, self.own_weights), new=False)
        fill(new / STATE, self.state, self.own_state.items(), new=False)
        for name in SINGLE, STATE:
            flush(new / name)


def outlines(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
