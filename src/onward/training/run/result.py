"""Evaluates a finished run."""

from contextlib import nullcontext
from typing import Any

from onward.base.files import write_json
from onward.checkpoint.peft.adapters import load_with_adapters
from onward.training.run.run import Run
from onward.transforms.draft_head import has_draft_head


def evaluate_run(run: Run, *, in_time: bool = False) -> dict[str, Any]:
    """Evaluate the saved model of a run (with a draft head, the model in memory) on its validation text, and write
    result.json. Returns the figures by name; {} without a validation text. With `in_time`, only as much of the text is
    evaluated as the time limit of the run allows. If the model is sharded over the processes, they evaluate it
    together, with its weights after the last step."""
    tokens = run.config.evaluation_tokens
    if in_time and run.budget and (share := run.budget.evaluated_share) < 1:
        tokens = max(2, int(share * (tokens or len(run.inputs.validation or ()))))
    divides = run.processes.divides
    model = (
        run.model
        if divides or has_draft_head(run.model)
        else load_with_adapters(run.folder, device=run.device)[0].eval()
    )
    with run.trainer.averaged() if divides else nullcontext():
        figures = run.inputs.evaluate(model, run.tokenizer, run.trainer.loss, tokens)
    if not run.processes.rank:
        write_json(run.folder / "result.json", figures | {"seconds": run.progress.seconds, "step": run.step})
    return figures
