"""Write the report of a run or of a model: report.html and loss.svg."""

from dataclasses import asdict
from pathlib import Path

import torch

from onward import fields
from onward.checkpoint.folder import load_model
from onward.device import choose_device
from onward.errors import UserError
from onward.evaluation.score import Evaluation
from onward.evaluation.text import evaluate_tokens
from onward.files import read_json, write_json
from onward.model.decoder import Decoder
from onward.reports.curve import write_loss_svg
from onward.reports.report import write_report
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.inputs import open_inputs
from onward.training.run import Run

SENTENCE = "The old clock on the wall had stopped, and nobody in the house knew when the old clock had stopped."
LOOKED_AT = 1024  # tokens of a run's text among which the page finds whole sentences


def write_reports(folder: Path, text: str = "", *, device: torch.device | str | None = None) -> Path:
    """Write report.html into the folder of a run, running, stopped or finished, or of any model; return its path.

    A folder whose metrics.jsonl has a step gets loss.svg too. The page shows the model of the newest save as it reads
    `text`, by default the beginning of the run's validation text. A UserError tells that the folder holds no model.
    """
    model, tokenizer = open_model(folder, device)
    page = write_report(folder, model, tokenizer, text or opening(folder, tokenizer))
    write_loss_svg(folder, model.config.vocab_size)
    return page


def conclude(run: Run) -> Evaluation | None:
    """Evaluate a run that has made its last step on its whole validation text; write result.json, and then the
    reports, which show the figures of result.json. None where the run has no validation text."""
    held, result = run.inputs.validation, None
    if held is not None:
        model, tokenizer = open_model(run.folder, run.device)
        result = evaluate_tokens(model, tokenizer, held, model.config.context_length, run.inputs.validation_bytes)
    figures = {} if result is None else asdict(result)
    write_json(run.folder / "result.json", figures | {"seconds": run.seconds, "step": run.step})
    write_reports(run.folder, device=run.device)
    return result


def open_model(folder: Path, device: torch.device | str | None) -> tuple[Decoder, Tokenizer]:
    """The model of a folder and its tokenizer."""
    model, _ = load_model(folder, device=choose_device(device))
    return model.eval(), Tokenizer.load(folder)


def opening(folder: Path, tokenizer: Tokenizer) -> str:
    """The beginning of a run's validation text, or of its training text where it has no other; a sentence of our own
    for a model without a run, or whose tokens have moved away."""
    try:
        config = fields.build(RunConfig, read_json(folder / "run.json"), "run.json")
        inputs = open_inputs(config, folder, "size")
    except UserError:
        return SENTENCE
    tokens = inputs.train[0] if inputs.validation is None else inputs.validation
    return tokenizer.decode(tokens[:LOOKED_AT].tolist())
