"""Runs: train or fine-tune a model into a run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from onward.api.folders import load
from onward.api.language_model import LanguageModel
from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.base.fields import build
from onward.reports.runs.write import conclude
from onward.training.config import RunConfig
from onward.training.finetuning.config import FinetuneConfig, with_method
from onward.training.keywords import FinetuneKeywords, RunKeywords
from onward.training.run.events import Event
from onward.training.run.lock import keeping
from onward.training.run.progress import progress
from onward.training.run.run import Run


@checked
def train(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    on_event: Callable[[Event], object] | None = None,
    **config: Unpack[RunKeywords],
) -> LanguageModel:
    """Train a fresh model on the texts in `sources` (files, folders, or the names of corpora) into the run folder
    `out`, and return it.

    `config` are the fields of RunConfig, such as tokenizer="char", steps=100 or model={"n_layers": 2}; `on_event` is
    called with a Step after each step and with a Validation after each validation; by default it shows the progress in
    a notebook or, if standard error is a terminal, there. `onward train --resume` continues a run that was stopped.
    """
    return trained(RunConfig, sources, out, on_event, config)


@checked
def finetune(
    base: str | Path,
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    on_event: Callable[[Event], object] | None = None,
    **config: Unpack[FinetuneKeywords],
) -> LanguageModel:
    """Train the model in the folder `base` on the examples in `sources` (such as .jsonl files) into the run folder
    `out`, and return it.

    `config` are the fields of FinetuneConfig, such as method="sft", template="chatml" or epochs=3, and those of the
    method, such as method="dpo", beta=0.2; `on_event` is the same as in `train`.
    """
    return trained(FinetuneConfig, sources, out, on_event, with_method({"base": str(base), **config}))


def trained(
    kind: type[RunConfig],
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    on_event: Callable[[Event], object] | None,
    config: Mapping[str, Any],
) -> LanguageModel:
    """Train a new run of this class of configuration, and return its model."""
    if not str(out):
        raise UserError("out is empty: give the folder of the run, such as 'runs/mybook'")
    texts = [sources] if isinstance(sources, str | Path) else sources
    if text := next((str(text) for text in texts if "\n" in str(text)), ""):
        raise UserError(
            f"Cannot train on the text {text[:20]!r}..., because sources are paths: write the text into a file first"
        )
    with keeping():
        run = Run.start(build(kind, {"sources": [str(text) for text in texts], "out": str(out), **config}))
    on_event = on_event or progress(run)
    for event in run.train():
        on_event(event)
    conclude(run)
    return load(run.folder, device=run.device)
