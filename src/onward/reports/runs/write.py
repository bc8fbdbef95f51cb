"""Writes the reports of a run or a model, at any time: report.html, loss.svg, and result.json when a run has ended."""

from pathlib import Path
from typing import Any

import torch

from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.checkpoint.peft.adapters import load_with_adapters
from onward.model.decoder import Decoder
from onward.reports.runs.card import write_report_card
from onward.reports.runs.curve import write_loss_svg
from onward.reports.runs.look import sentence_ends
from onward.reports.runs.record import Figures, Record
from onward.reports.runs.report import write_report
from onward.reports.runs.scores import keep_scores, scores_of
from onward.text.tokenizer import Tokenizer
from onward.training.run.result import evaluate_run
from onward.training.run.run import Run
from onward.training.stages import inputs_of
from onward.training.step.tasks import task_results

SENTENCE = "The old clock on the wall had stopped, and nobody in the house knew when the old clock had stopped."
OPENING = 1024  # tokens of a run's text among which the page finds whole sentences


def write_reports(
    folder: Path,
    text: str = "",
    *,
    out: Path | None = None,
    compare: Path | None = None,
    device: torch.device | str | None = None,
) -> Figures:
    """Write report.html and, for a run, loss.svg and card.md into the folder of a run (running, stopped or
    finished) or of a model. Return the figures on the page.

    The page shows the model of the newest save reading `text`, by default sentences of the run's validation text. With
    `out`, only the page is written, to that path. `compare` is the folder of another run, whose curves are drawn too.
    Raises a UserError if the folder contains no model.
    """
    model, tokenizer = open_model(folder, device)
    other = None if compare is None else Record(compare)
    figures = write_report(
        out or folder / "report.html", Record(folder), model, tokenizer, text or opening(folder, tokenizer), other
    )
    if out is None:
        write_loss_svg(folder, Record(folder).guesses(model.config.vocab_size))
        write_report_card(folder, model, tokenizer)
    return figures


def conclude(run: Run) -> dict[str, Any]:
    """Finish a run after its last step: evaluate it on its validation text within the rest of its time limit, write
    result.json and the reports, and return the figures by name; {} without a validation text. With several processes,
    only that of rank 0 writes."""
    figures = evaluate_run(run, in_time=True)
    if run.processes.rank:
        return figures
    device = "cpu" if run.processes.divides else run.device
    if run.tasks:
        model, _ = open_model(run.folder, device)
        results = task_results(run.tasks, model, run.tokenizer, run.config.task_limit)
        keep_scores(run.folder, scores_of(run.tasks, results, run.step))
    write_reports(run.folder, device=device)
    return figures


def open_model(folder: Path, device: torch.device | str | None) -> tuple[Decoder, Tokenizer | None]:
    """Load the model in a folder and, if the folder has one, its tokenizer (else None), onto a device (None: the best
    one available)."""
    model, _, source = load_with_adapters(folder, device=choose_device(device))
    return model.eval(), source.tokenizer()


def opening(folder: Path, tokenizer: Tokenizer | None) -> str:
    """Return complete sentences near the beginning of a run's validation text or, without one, of its training text,
    for the page that shows the model reading them. Returns SENTENCE, a fixed text, for a model without a run and if the
    run's tokens were removed, and "" without a tokenizer."""
    try:
        inputs = inputs_of(folder)
    except UserError:
        return SENTENCE
    if tokenizer is None:
        return ""
    tokens = inputs.train[0] if inputs.validation is None else inputs.validation
    text = tokenizer.decode(tokens[:OPENING].tolist())
    return text[next(sentence_ends(text), 0) :].strip()  # the validation text begins anywhere in a sentence
