"""Data parallel training: each process computes some batches of a step, and the gradients are summed."""

import atexit
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn


@dataclass(frozen=True)
class Processes:
    """The rank of this process and the number of processes that torchrun started; (0, 1) without torchrun."""

    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> "Processes":
        """Join the process group, if torchrun started several processes: see its RANK and WORLD_SIZE."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls()
        if not distributed.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            # imported later, the defaults of its functions would keep the group alive, with its threads
            from torch.distributed.nn import functional  # noqa: F401

            # the first process prepares the data alone, which may take hours
            distributed.init_process_group(timeout=timedelta(days=1))
            atexit.register(distributed.destroy_process_group)  # its threads must not outlive Python
        return cls(distributed.get_rank(), count)

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.sum([0.0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all processes."""
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor)
        return tensor.tolist()

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
