"""Memory of a compiled step: results that are not needed at the same time share memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from onward.compiled.needed import memory, reads_and_writes, tensors_in
from onward.compiled.recording import Operation, StepRecord


def tensors_of(record: StepRecord) -> list[Tensor]:
    parts = [record.arguments, record.options, record.result] if isinstance(record, Operation) else vars(record)
    return [*tensors_in(parts)]


@torch.inference_mode(False)
@torch.no_grad()
def reuse_memory(records: Sequence[StepRecord], result: Any) -> None:
    """Move each tensor that only the operations `records` use, in this order, to the memory of an earlier one of equal
    size whose last use is over. Otherwise the memory of a step for a long prompt may exceed that of the weights.
    `result` is what the step returns, which keeps its memory."""
    last: dict[int, int] = {}  # index of the last record that uses a storage, by its address
    for index, record in enumerate(records):
        last.update(dict.fromkeys(memory(tensors_of(record)), index))
    free = defaultdict[int, list[UntypedStorage]](list)  # storages that are not in use, by size
    homes, known = dict[int, UntypedStorage](), memory(result)
    for index, record in enumerate(records):
        storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, tensors_of(record))}
        reads, writes = reads_and_writes(record)
        for address in writes - reads - known:  # a storage that is first read is a weight, an input or a constant
            same = free[storages[address].nbytes()]
            homes[address] = same.pop() if same else storages[address]
        known |= storages.keys()
        for address in homes.keys() & storages.keys():
            if last[address] == index:
                free[homes[address].nbytes()].append(homes[address])
    for tensor in (tensor for record in records for tensor in tensors_of(record)):
        if (home := homes.get(tensor.untyped_storage().data_ptr())) is not None:
            tensor.set_(home, tensor.storage_offset(), tensor.shape, tensor.stride())
