"""Short prompts by compiled steps, and steps that are compiled before the first request.

Shapes: B rows, T tokens of each, D d_model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onward.compiled.interface import NotCompilable, Step
from onward.compiled.steps import CompiledSteps
from onward.model.decoder import without_dropout

if TYPE_CHECKING:
    from onward.generation.runner import Runner

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


def compile_ahead(runner: Runner, rows: int, folder: Path | None) -> str:
    """Compile decoding steps of `rows` rows, and prefills of as many short prompts, with the adapter that the model
    currently uses; their machine code is stored in `folder`. Returns "", or the reason why decoding steps cannot be
    compiled."""
    if runner.state is None or runner.compile_after is None:
        return "compile_after is None"
    runner.adapter(None)  # sets `selection`, which otherwise the first request sets
    steps = runner.compiled = runner.compiled or CompiledSteps(runner.model, runner.cache, runner.state)
    prompts = [(runner.prompt_step, width) for width in range(TILE, runner.max_prompt // rows + 1, TILE)]
    with torch.inference_mode(), without_dropout(runner.model):
        for step, width in [(runner.compiled_step, 1), *prompts]:
            try:
                steps.compile(step, (rows, width), folder)
            except NotCompilable as reason:
                if step is runner.compiled_step:
                    return str(reason)
                break
            runner.num_plain[runner.kind(step, rows, width)] = runner.compile_after
    return ""
