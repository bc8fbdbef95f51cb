"""Steps that are compiled before the first request."""

from __future__ import annotations

from pathlib import Path

import torch

from onward.compiled.interface import NotCompilable
from onward.compiled.steps import CompiledSteps
from onward.generation.compiled_prompts import TILE
from onward.generation.runner import Runner
from onward.model.decoder import without_dropout


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
