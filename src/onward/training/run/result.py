"""Evaluates a finished run."""

from typing import Any

from onward.checkpoint.peft.adapters import load_with_adapters
from onward.files import write_json
from onward.training.run.run import Run


def evaluate_run(run: Run) -> dict[str, Any]:
    """Evaluate the saved model of a run on its validation text, and write result.json. Returns the figures; {} without
    a validation text."""
    model, _, _ = load_with_adapters(run.folder, device=run.device)
    figures = run.inputs.evaluate(model.eval(), run.tokenizer, run.trainer.loss, run.config.evaluation_tokens)
    write_json(run.folder / "result.json", figures | {"seconds": run.progress.seconds, "step": run.step})
    return figures
