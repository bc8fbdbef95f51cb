"""A decoding step on a CPU as one program of machine code, made in four stages: record, lower, link, bind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from torch import Tensor

from onward.compiled.binding import Binding
from onward.compiled.interface import CompiledStep, Step, StepShape
from onward.compiled.inventory import Inventory
from onward.compiled.linking import LinkedCalls
from onward.compiled.lowering import lower
from onward.compiled.needed import is_read, needed
from onward.compiled.recording import Recording, record_step
from onward.compiled.reuse import reuse_memory
from onward.model.adapters import Selection, selection
from onward.model.cache import KVCache
from onward.model.decoder import Decoder


class Program(CompiledStep):
    """A decoding step on a CPU, compiled from its recorded operations to a sequence of kernels. `weights` are the
    tensors that may change between runs, in place; `folder` keeps machine code for the next start; `chosen` is the
    Selection of the model's LoRA adapters. Raises NotCompilable if the step cannot be compiled."""

    def __init__(
        self,
        recording: Recording,
        cache: KVCache,
        weights: Sequence[Tensor],
        folder: Path | None = None,
        chosen: Selection | None = None,
    ) -> None:
        records = needed(recording, weights)
        self.recording, self.chosen = replace(recording, records=records), chosen
        reuse_memory(records, recording.result)
        self.uses_rope_length = is_read(recording.rope_length, records)
        self.uses_adapters = is_read(recording.adapters, records)
        calls = lower(records, cache, recording.positions)
        self.linked = LinkedCalls(calls, folder)
        self.binding = Binding(calls, cache, rows=recording.tokens.size(0))

    @classmethod
    def compile(cls, model: Decoder, cache: KVCache, shape: StepShape, step: Step) -> Self:
        return cls.compile_ahead(model, cache, shape, step, None)

    @classmethod
    def compile_ahead(cls, model: Decoder, cache: KVCache, shape: StepShape, step: Step, folder: Path | None) -> Self:
        chosen = selection(model)
        recording = record_step(partial(step, model), cache, shape, chosen)
        return cls(recording, cache, Inventory(model).tensors, folder, chosen)

    def run(self, tokens: Tensor, positions: Tensor, cache: KVCache, length: int, first: int = 0) -> Tensor:
        self.recording.tokens.copy_(tokens)
        self.recording.positions.copy_(positions)  # the kernels compute the slots to read and write from them
        if self.uses_rope_length:
            self.recording.rope_length.copy_(cache.rope_length[first : first + tokens.size(0)])
        if self.uses_adapters and self.chosen:
            self.chosen.current.write_to(self.recording.adapters)
        self.binding.follow(cache, first)
        cache.states.note(positions, first)
        self.linked.run()
        return self.recording.result
