"""The runs of a quickstart: pre-training on the built-in text, supervised fine-tuning, and preference training.

FOLDER/        pre-training, and the questions for the other runs
FOLDER-sft/    fine-tuning on questions about Python and their answers
FOLDER-dpo/    preference training on pairs of a right and a wrong answer
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.api.folders import load
from onward.api.language_model import LanguageModel
from onward.base.errors import UserError
from onward.base.files import read_json
from onward.data.corpora import BUILT_IN
from onward.data.questions import answers, asked, conversations, preferences, write_rows
from onward.text.chat import chat_of
from onward.text.templates import with_template
from onward.training.config import RunConfig, seconds
from onward.training.finetuning.base import base_of
from onward.training.finetuning.config import FinetuneConfig
from onward.training.methods import Method
from onward.training.methods.answers.sft import SFT
from onward.training.methods.preferences.dpo import DPO
from onward.training.methods.preferences.simpo import SimPO
from onward.training.run.lock import run_lock
from onward.training.run.run import Run
from onward.training.step.loss import CrossEntropy

TEMPLATE, HELD_OUT = "plain", 10  # every tenth question is held out
NUM_ANSWERS, MAX_TOKENS = 32, 48  # held-out questions to answer, and maximum number of tokens in an answer


@dataclass(frozen=True)
class AssistantStage:
    """A fine-tuning run of `onward quickstart --assistant`."""

    method: Method
    purpose: str  # completes "Learning ..."
    share: float  # fraction of the quickstart's time
    learning_rate: float

    def folder(self, base: Path) -> Path:
        return base.with_name(f"{base.name}-{self.method.kind}")


STAGES = (
    AssistantStage(SFT(), "to answer questions", 0.65, 1.5e-3),
    AssistantStage(DPO(), "to prefer the better of two answers", 0.35, 5e-4),
)


def pretraining(out: str, time: str, processes: int) -> RunConfig:
    """The configuration of pre-training on the documentation and comments in Python's standard library; `time` is text
    such as 5m, and a step has one batch for each process."""
    return RunConfig(
        sources=("embedded-train",),
        validation="embedded-validation",
        out=out,
        time=time,
        prompt="Return the",
        accumulation=processes,
    )


def make_room(config: RunConfig, *, assistant: bool) -> None:
    """Remove the runs of an earlier quickstart; raises a UserError, before anything is removed, if a folder contains
    other files."""
    folder = Path(config.out)
    stale = [stage.folder(folder) for stage in STAGES if assistant and stage.folder(folder).exists()]
    for old in stale:
        if not str(options_of(old).get("sources", [""])[0]).startswith(str(folder)):
            raise UserError(
                f"Cannot replace {old}, because it contains files other than a quickstart's: choose another --out"
            )
    if folder.exists():
        earlier = options_of(folder)
        if earlier.get("prompt") != config.prompt or not BUILT_IN.keys() >= {*earlier["sources"]}:
            raise UserError(
                f"Cannot replace {folder}, because it contains files other than a quickstart's: choose another --out"
            )
        with run_lock(folder):
            shutil.rmtree(folder)
    for old in stale:
        shutil.rmtree(old)


def options_of(folder: Path) -> dict[str, Any]:
    """The options in run.json; {} without a run."""
    options: dict[str, Any] = read_json(folder / "run.json") if (folder / "run.json").exists() else {}
    return options


def held_out_answers() -> dict[str, str]:
    """Right answers to the held-out questions, by function; no fine-tuning run trains on them."""
    return dict([*answers().items()][HELD_OUT - 1 :: HELD_OUT])


def finetuning(stage: AssistantStage, base: Path, before: Path, time: str, processes: int) -> FinetuneConfig:
    """Write a stage's training and held-out questions into `base`, the folder of the pre-training run, and return the
    stage's configuration, which fine-tunes the run `before` for the stage's share of `time`, such as 5m."""
    held_out = held_out_answers()
    trained = {name: answer for name, answer in answers().items() if name not in held_out}
    rows = conversations if isinstance(stage.method, SFT) else preferences
    files = [base / f"{stage.method.kind}-{part}.jsonl" for part in ("train", "held-out")]
    for file, part in zip(files, (trained, held_out)):
        write_rows(file, rows(part))
    return FinetuneConfig(
        base=str(before),
        sources=(str(files[0]),),
        validation=str(files[1]),
        out=str(stage.folder(base)),
        method=stage.method,
        template=TEMPLATE if isinstance(stage.method, SFT) else "",
        time=f"{max(1.0, stage.share * seconds(time)):g}s",
        learning_rate=stage.learning_rate,
        accumulation=processes,
    )


def with_chat(folder: Path) -> LanguageModel:
    # the pre-trained model has no chat template
    lm = load(folder)
    lm.tokenizer = with_template(lm.text(), TEMPLATE)
    return lm


def stage_figures(base: Path, runs: Mapping[str, Run]) -> Iterator[dict[str, Any]]:
    """A row for the pre-training run in `base` and for each of the `runs` (by method), measured on held-out questions:
    loss of right answers, share of pairs whose right answer is preferred, share of answers that end."""
    ranking = SimPO().loss(base_of(FinetuneConfig(base=str(base))))  # needs no reference model
    names = [*held_out_answers()][:NUM_ANSWERS]
    for stage, folder in {"pre-training": base, **{name: run.folder for name, run in runs.items()}}.items():
        lm = with_chat(folder)
        prompts = [[*chat_of(lm.text()).encode(asked(name))] for name in names]
        done = [answer.finish_reason for (answer,) in lm.complete(prompts, MAX_TOKENS, temperature=0.0)]
        yield {
            "stage": stage,
            "loss_of_answers": runs["sft"].inputs.evaluate(lm.model, lm.text(), CrossEntropy())["loss"],
            "right_answer_preferred": runs["dpo"].inputs.evaluate(lm.model, lm.text(), ranking)["accuracy"],
            "answers_that_end": done.count("stop") / len(done),
        }
