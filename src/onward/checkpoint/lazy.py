"""The weights of a stored model, read one at a time by processes that each keep only a part of every weight."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.load import add_stored_head, open_source
from onward.checkpoint.names import common_dtype, find, rows, to_ours, to_theirs
from onward.checkpoint.source import Outline
from onward.checkpoint.weights import FLOATS
from onward.model.decoder import Decoder
from onward.model.deferred import defer


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are read at each lookup, so that none stays in memory."""

    def __init__(self, reads: Mapping[str, Callable[[], Tensor]]) -> None:
        self.reads = reads

    def __getitem__(self, name: str) -> Tensor:
        return self.reads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.reads)

    def __len__(self) -> int:
        return len(self.reads)


class StoredWeights:
    """Reads a model's weights onto the CPU, by the names of Decoder's parameters. A weight that needs no conversion is
    memory-mapped; any other weight is read together with the weights in the same stored tensor. Elements are not
    checked for being finite."""

    def __init__(self, outline: Outline, dtype: torch.dtype | None) -> None:
        self.family, self.config = outline.names, outline.config
        self.outlines = dict(outline.model.named_parameters())
        wanted = dict(to_theirs(self.family, self.config, self.outlines))
        self.stored = find(self.family, self.config, wanted, outline.stored)
        self.rows: dict[str, tuple[list[str], list[str]]] = {}
        for their, ours, _, _ in rows(self.family, self.config, self.outlines):
            self.rows |= dict.fromkeys(ours, (their if isinstance(their, list) else [their], ours))
        trained = {piece for name, p in self.outlines.items() if p.requires_grad for piece in self.rows[name][0]}
        self.dtype, self.common = dtype, dtype or common_dtype({name: self.stored[name] for name in trained})

    def dtype_of(self, name: str) -> torch.dtype:
        if self.dtype or self.outlines[name].requires_grad:
            return self.common
        return FLOATS[self.stored[self.rows[name][0][0]].dtype]

    def read(self, name: str) -> Tensor:
        pieces, ours = self.rows[name]
        read, _ = to_ours(
            self.family,
            self.config,
            {piece: self.stored[piece] for piece in pieces},
            {our: self.outlines[our] for our in ours},
            dtype=self.dtype_of(name),
            device=torch.device("cpu"),
            allow_nonfinite=True,
            precisions={},
        )
        return read[name]


def load_outline(path: Path, dtype: torch.dtype | None = None) -> tuple[Decoder, dict[str, Any]]:
    """Load a decoder onto the meta device with deferred parameters (see `model/deferred.py`), and its config.json; only
    headers of files are read."""
    outline = open_source(path).outline()
    if any(tensor.quantized for tensor in outline.stored.values()):
        raise UserError(f"{path} has quantized weights, which processes cannot divide: use replicas only")
    add_stored_head(outline.model, outline.stored, outline.hf)
    weights = StoredWeights(outline, dtype)
    for name, parameter in outline.model.named_parameters():
        parameter.data = parameter.data.to(weights.dtype_of(name))
        defer(parameter, partial(weights.read, name))
    return outline.model.eval(), outline.hf
