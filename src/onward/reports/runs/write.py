"""Writes the reports of a run or a model, at any time: report.html, loss.svg, card.md, and result.json when a run has
ended."""

from pathlib import Path
from typing import Any

import torch

from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.checkpoint.draft_heads import draft_base, is_draft_head
from onward.checkpoint.peft.adapters import load_with_adapters
from onward.model.decoder import Decoder
from onward.reports.runs.card import write_report_card
from onward.reports.runs.curve import write_loss_svg
from onward.reports.runs.look import sentence_ends
from onward.reports.runs.record import Figures, RunRecord
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
    """Write report.html and, for a run, loss.svg and card.md into the folder of a run or model. The page shows how the
    newest save reads `text`, by default sentences of the run's validation or training text. With `out`, only the page
    is written, to that path. With `compare`, the curves of that run are also drawn."""
    model, tokenizer = open_model(folder, device)
    other = None if compare is None else RunRecord(compare)
    figures = write_report(
        out or folder / "report.html", RunRecord(folder), model, tokenizer, text or opening(folder, tokenizer), other
    )
    if out is None:
        write_loss_svg(folder, RunRecord(folder).guesses(model.config.vocab_size))
        write_report_card(folder, model, tokenizer)
    return figures


def conclude(run: Run) -> dict[str, Any]:
    """Evaluate a run after its last step within its time limit, and write result.json and the reports. With several
    processes, only rank 0 writes."""
    figures = evaluate_run(run, in_time=True)
    if run.processes.rank:
        return figures
    device = "cpu" if run.processes.divides else run.device
    if run.tasks:
        model, _ = open_model(run.folder, device)
        results = task_results(run.tasks, model, run.tokenizer, run.config.task_limit)
        keep_scores(run.folder, scores_of(run.tasks, results, run.step))
    # from result.json, so that page, file and console show the same figures
    write_reports(run.folder, device=device)
    return figures


def open_model(folder: Path, device: torch.device | str | None) -> tuple[Decoder, Tokenizer | None]:
    folder = draft_base(folder) if is_draft_head(folder) else folder
    model, _, source = load_with_adapters(folder, device=choose_device(device))
    return model.eval(), source.tokenizer()


def opening(folder: Path, tokenizer: Tokenizer | None) -> str:
    """Sentences near the beginning of the validation or training text, for the page; SENTENCE for a folder without such
    a text, "" without a tokenizer."""
    try:
        inputs = inputs_of(folder)
    except UserError:
        return SENTENCE
    if tokenizer is None:
        return ""
    tokens = inputs.train[0] if inputs.validation is None else inputs.validation
    text = tokenizer.decode(tokens[:OPENING].tolist())
    return text[next(sentence_ends(text), 0) :].strip()  # the validation text may begin within a sentence
