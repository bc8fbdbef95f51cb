"""The computation of draft tokens by a draft head as a compiled program on a CPU, with integer weights.

Shapes: B requests, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from onward.compiled.interface import NotCompilable
from onward.generation.request import Request, inverse_temperature
from onward.kernels.drawn_tokens import drawn_tokens  # noqa: F401  # which registers the operation
from onward.model.decoder import Decoder
from onward.model.draft_head import DraftHead, embedded
from onward.model.layers import Linear

PRECISION: Literal["int8"] = "int8"  # precision of the weights that a program reads


class IntegerHead:
    """A draft head and the output layer of its model with copies of their weights as integers, which are read several
    times faster than the original weights. Draft tokens change no text, so rounding changes only how many of them are
    accepted."""

    def __init__(self, model: Decoder, head: DraftHead) -> None:
        from onward.transforms.quantize import QuantizedLinear, quantize_model

        self.model, self.head = model, deepcopy(head)
        self.output: nn.Module = model.head
        quantize_model(self.head, PRECISION)
        if isinstance(model.head, Linear):
            self.output = QuantizedLinear.of(model.head, PRECISION)

    def __call__(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states (B, D) after the tokens (B,), computed from the states before them, and the logits (B, V)
        of the next tokens."""
        model, state = self.model, self.head(state, embedded(self.model, tokens))
        logits = self.output(model.embed_out(self.head.norm(state)))
        return state, model.logit_softcap(model.logit_scale(logits))

    def tensors(self) -> list[Tensor]:
        model = self.model
        parts = model.embed, model.embed_in, model.embed_norm, model.embed_out, self.output, self.head
        return [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]


class GuessProgram:
    """The compiled computation of a draft token for each of `rows` requests: `start`, then `run` for each token in
    turn. Raises NotCompilable if it cannot be compiled."""

    def __init__(self, head: IntegerHead, rows: int) -> None:
        from onward.compiled.function import CompiledFunction  # imported here because it imports the compiler

        self.state = torch.zeros(rows, head.model.config.d_model, dtype=head.model.dtype)
        self.numbers = torch.zeros(3, rows, dtype=torch.int64)
        self.last, seeds, index = self.numbers  # the last tokens, and the indices of the draft tokens
        self.factors, self.temperatures = torch.zeros(rows), [0.0] * rows

        def guess() -> tuple[Tensor, ...]:
            state, logits = head(self.state, self.last)
            tokens = torch.ops.onward.drawn_tokens(logits, self.factors, seeds, index)
            p = logits.float().softmax(-1).gather(-1, tokens[:, None])
            return self.state.copy_(state), self.last.copy_(tokens), index.add_(1), logits, p

        self.program = CompiledFunction(guess, (self.state, self.numbers, self.factors), head.tensors())

    def start(self, states: Tensor, requests: Sequence[Request]) -> None:
        """Begin after each request's last token; `states` (B, D) are the model's hidden states before that token."""
        self.state.copy_(states)
        last, index = [r.last_token for r in requests], [len(r.tokens) for r in requests]
        self.numbers.copy_(torch.tensor([last, [r.seed for r in requests], index]))
        if self.temperatures != (temperatures := [r.sampling.temperature for r in requests]):
            self.factors.copy_(torch.tensor([inverse_temperature(t) for t in temperatures]))
            self.temperatures = temperatures

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next draft tokens (B,), drawn at the requests' temperatures, -1 where there is no
        distribution; their probabilities (B, 1) at temperature 1; and the logits (B, V). The next run overwrites all
        three, and continues after `self.last`, these tokens unless the caller changes them."""
        _, tokens, _, logits, p = self.program.run()
        return tokens, p, logits


@dataclass
class Programs:
    """The programs of a draft head, by the number of requests; `key` identifies the state of the weights."""

    key: tuple[int, ...]
    head: IntegerHead
    by_rows: dict[int, GuessProgram | None] = field(default_factory=dict)


PROGRAMS: WeakKeyDictionary[DraftHead, Programs] = WeakKeyDictionary()


@torch.inference_mode(False)  # inference mode would record composite operations undecomposed
@torch.no_grad()
def guess_program(model: Decoder, head: DraftHead, rows: int) -> GuessProgram | None:
    """Return the program that drafts one token for each of `rows` requests, compiled once and reused while the weights
    are the same; None if it cannot be compiled."""
    tensors = [*model.embed.parameters(), *model.head.parameters(), *model.head.buffers(), *head.parameters()]
    key = tuple(number for t in tensors for number in (t.data_ptr(), 0 if t.is_inference() else t._version))
    if head not in PROGRAMS or PROGRAMS[head].key != key:
        PROGRAMS[head] = Programs(key, IntegerHead(model, head))
    programs = PROGRAMS[head]
    if rows not in programs.by_rows:
        try:
            programs.by_rows[rows] = GuessProgram(programs.head, rows)
        except NotCompilable:
            programs.by_rows[rows] = None
    return programs.by_rows[rows]
