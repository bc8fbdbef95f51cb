"""`onward evaluate --tasks --against`: the questions that were in training data, and the scores without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.data.progress import Progress

if TYPE_CHECKING:
    from onward.data.tokens import Tokens
    from onward.evaluation.contamination import GradedQuestions
    from onward.text.tokenizer import Tokenizer


def training_data(name: str) -> tuple[Tokenizer, Sequence[Tokens]]:
    """Verify the checksums of the files in the folder `name`, which holds data prepared by `onward data` or a run on
    texts; return its tokenizer and the tokens of each text source. Raises a UserError for any other folder."""
    from onward.data.tokens import is_prepared, load_tokens
    from onward.text.tokenizer import Tokenizer
    from onward.training.stages import inputs_of

    folder = Path(name)
    if is_prepared(folder):
        sources = load_tokens(folder, "sha256").sources
    elif (folder / "inputs.json").exists():
        sources = inputs_of(folder, "sha256").train
    else:
        raise UserError(f"against is {name}, which has no tokens: name a folder of onward data prepare, or a run")
    if not sources:
        raise UserError(
            f"against is {name}, a run on examples: name a run on texts, or a folder of onward data prepare"
        )
    return Tokenizer.load(folder), sources


def contamination_rows(
    graded: Mapping[str, Sequence[GradedQuestions]], data: tuple[Tokenizer, Sequence[Tokens]], progress: Progress
) -> list[dict[str, Any]]:
    """Return a table row (dict) for each model and task: the share of the task's questions that occur in the training
    data, the number of questions too short to be searched for, the score with and without the questions that occur, and
    the number of questions without them. `graded` maps each model's name to its questions and grades, `data` are the
    tokenizer and the tokens of each source of training data, and `progress` is called with the number of tokens
    searched."""
    from onward.evaluation.contamination import N, contaminated

    tokenizer, sources = data
    total = sum(map(len, sources))
    every = {text for tasks in graded.values() for task in tasks for texts in task.texts for text in texts}
    items = {text: tokenizer.encode(text, special=False) for text in every}
    flags = contaminated([*items.values()], sources, lambda done: progress("training tokens", done, total))
    dirty = {text for text, flag in zip(items, flags) if flag}
    rows = []
    for model, tasks in graded.items():
        for task in tasks:
            flags = [not dirty.isdisjoint(texts) for texts in task.texts]
            clean = [grade for grade, flag in zip(task.grades, flags, strict=True) if not flag]
            rows.append(
                {
                    "model": model,
                    "task": task.task,
                    "contaminated": fmean(flags),
                    "too_short": sum(all(len(items[text]) < N for text in texts) for texts in task.texts),
                    "score": fmean(task.grades),
                    "score_without": fmean(clean) if clean else None,
                    "questions_without": len(clean),
                }
            )
    return rows
