"""Several processes that train one model: each computes some of a step's batches, and their gradients are summed."""

import atexit
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn


@dataclass(frozen=True)
class Processes:
    """This process among those that torchrun started; alone without it."""

    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> "Processes":
        """Meet the others, if torchrun started some: see RANK and WORLD_SIZE in its documentation."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls()
        if not distributed.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            # the defaults of its functions keep a group that is there when they are first read, threads and all
            from torch.distributed.nn import functional  # noqa: F401

            # the first prepares the data alone, which may take hours
            distributed.init_process_group(timeout=timedelta(days=1))
            atexit.register(distributed.destroy_process_group)  # its threads must not outlive Python
        return cls(distributed.get_rank(), count)

    def wait(self) -> None:
        """Go on when all have come here."""
        self.sum([0.0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes."""
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor)
        return tensor.tolist()

    def sum_gradients(self, model: nn.Module) -> None:
        """Give every process the sum of the gradients."""
        if self.count > 1:
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # an expert that no token of this process visited
            self.sum_tensors(p.grad for p in model.parameters() if p.grad is not None)

    def sum_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the sums of tensors, in place."""
        if self.count > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)
