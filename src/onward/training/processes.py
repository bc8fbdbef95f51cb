"""Data parallel training: each process computes some batches of a step, and the gradients are summed."""

import atexit
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from onward.errors import UserError

STORES: list[distributed.Store] = []  # of the process group that was joined


def leave() -> None:
    """Leave torch's process group."""
    STORES.clear()
    distributed.destroy_process_group()


@dataclass(frozen=True)
class Processes:
    """The rank of this process and the number of processes that torchrun started; (0, 1) without torchrun."""

    rank: int = 0
    count: int = 1
    store: distributed.Store | None = None  # of small values that all processes see; None for one process

    @classmethod
    def join(cls) -> "Processes":
        """Join the process group, if torchrun started several processes: see its RANK and WORLD_SIZE. Raises a
        UserError if the processes cannot connect."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls()
        if not distributed.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())  # --device cpu
            # imported later, the defaults of its functions would keep the group alive, with its threads
            from torch.distributed.nn import functional  # noqa: F401

            # the first process prepares the data alone, which may take hours
            day = timedelta(days=1)
            try:
                store, rank, count = next(distributed.rendezvous("env://"))
                group = distributed.PrefixStore("group", store)
                distributed.init_process_group(store=group, rank=rank, world_size=count, timeout=day)
            except RuntimeError as error:
                where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                reason = str(error).splitlines()[0]
                raise UserError(
                    f"the processes cannot meet at {where} ({reason}): choose another --master-port"
                ) from None
            STORES.append(distributed.PrefixStore("onward", store))
            atexit.register(leave)  # the group's threads must not outlive Python
        return cls(distributed.get_rank(), count, STORES[-1] if STORES else None)

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        self.sum([0.0])

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """A context that the other processes enter when the first has left it."""
        if self.rank:
            self.wait()
        yield
        if not self.rank:
            self.wait()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all processes."""
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor)
        return tensor.tolist()

    def check_batches(self, batches: int) -> None:
        """Raise a UserError if a step has fewer batches than there are processes."""
        if batches < self.count:
            raise UserError(
                f"accumulation is {batches} for {self.count} processes, and each needs a batch: start fewer processes, "
                f"or a run with --accumulation {self.count}"
            )

    def check_same(self, facts: dict[str, object]) -> None:
        """Raise a UserError in all processes if a process has another value for a fact, by name, than rank 0."""
        if self.count == 1:
            return
        of_ranks: list[Any] = [None] * self.count
        distributed.all_gather_object(of_ranks, facts)
        for rank, other in enumerate(of_ranks):
            if differ := [name for name, value in of_ranks[0].items() if other[name] != value]:
                raise UserError(
                    f"the ranks hold different runs: rank {rank} differs from rank 0 in {' and '.join(differ)}; "
                    "give all ranks one run folder, on a shared disk"
                )

    def sum_gradients(self, model: nn.Module) -> None:
        """Replace the gradients by their sums over all processes."""
        if self.count > 1:
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # an expert without a token in this process
            self.sum_tensors(p.grad for p in model.parameters() if p.grad is not None)

    def sum_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over all processes, in place."""
        if self.count > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)
