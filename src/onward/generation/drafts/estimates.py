"""Estimates of how many draft tokens save the most time.

The time of a proposal, in plain decoding steps, is estimated from the bytes of the weights that a draft token and a
step read, and not measured, so that a request takes the same steps whenever it is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from onward.generation.drafts.costs import COST, cost_of, rounds_rows_apart
from onward.generation.drafts.paced import LENGTHS, MOST_ROWS, OF_INTEGERS
from onward.generation.drafts.times import expected_tokens
from onward.generation.request import Request
from onward.model.decoder import Decoder

# overhead of a proposal and of a step, as the bytes of weights that are read in that time
AROUND_PROPOSAL, AROUND_STEP = 4_400_000, 16_000_000
TILE = 4  # tokens that a dense model verifies in the time of a plain step
LIKELY, TRIALS = 0.8, 5  # prior share of accepted draft tokens, and its weight as a number of draft tokens
LEAST_GAIN = 1.15  # least estimated speed-up for a proposal; above 1 because estimates may be wrong


class Estimates:
    """The estimated times of the proposals of a draft for `model`; one draft token takes as long as reading `guess`
    bytes. A proposal has one of `lengths` tokens, and there is none while more than `most_rows` requests decode."""

    def __init__(self, model: Decoder, guess: float) -> None:
        apart = rounds_rows_apart(model)
        self.lengths: Sequence[int] = OF_INTEGERS if apart else LENGTHS
        self.most_rows = 1 if apart else MOST_ROWS
        step = AROUND_STEP + size(model) - (0 if model.config.tied else size(model.embed))
        self.around, self.one, self.cost = AROUND_PROPOSAL / step, guess / step, cost_of(model)

    def gain(self, requests: Sequence[Request]) -> tuple[float, float]:
        """Return the greatest estimated speed-up by proposals of one of `lengths` tokens, or 0 if it is too small, and
        the assumed rate of accepted draft tokens, which follows the rate so far."""
        count = len(requests)
        shares = [(LIKELY * TRIALS + r.num_accepted) / (TRIALS + r.num_drafted) for r in requests]
        rate = min(sum(shares) / count, 0.99)
        gain = max(expected_tokens(rate, n) / self.time(n, count) for n in self.lengths)
        return (0.0 if count > self.most_rows or gain < LEAST_GAIN else gain), rate

    def time(self, length: int, rows: int) -> float:
        """Estimate the time of a step with proposals of `length` tokens, in units of a plain step with as many rows."""
        verifying = 1 + self.cost * max(rows * (1 + length) - (TILE if self.cost == COST else rows), 0)
        return verifying + self.around + length * self.one

    def room(self, room: Sequence[int]) -> list[int]:
        """Return the greatest of `lengths` that fits into each of `room`, or 0."""
        return [max((n for n in self.lengths if n <= most), default=0) for most in room]


def size(module: nn.Module) -> int:
    """Return the bytes of the weights of a module."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
