"""Short prompts by compiled steps.

Shapes: B rows, T tokens of each, D d_model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onward.compiled.interface import Step
from onward.compiled.steps import CompiledSteps

TILE = 16  # tokens of a prompt are padded to a multiple of this number


def prefill(
    steps: CompiledSteps, step: Step, first: int, pieces: Sequence[Sequence[int]], starts: Sequence[int], width: int
) -> Any:
    """Compute the result of `step`, such as hidden states (B, T, D), for `pieces` of prompts padded to `width` tokens,
    in rows and at positions as in `Runner.forward_rows`; None if the caller must compute it."""
    # padding repeats a row's last token at its position, and so writes the same keys and values again
    columns = [[min(column, len(piece) - 1) for column in range(width)] for piece in pieces]
    tokens = torch.tensor([[piece[column] for column in row] for piece, row in zip(pieces, columns)])
    positions = torch.tensor(columns) + torch.tensor(starts)[:, None]
    return steps.run(step, tokens, positions, max(starts) + width, first)
