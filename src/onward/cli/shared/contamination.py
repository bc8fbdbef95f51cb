"""`onward evaluate --tasks --against`: the questions that were in training data, and the scores without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from onward.data.progress import Progress
from onward.errors import UserError

if TYPE_CHECKING:
    from onward.data.tokens import Tokens
    from onward.evaluation.benchmark import TaskResult
    from onward.text.tokenizer import Tokenizer


def training_data(name: str) -> tuple[Tokenizer, Sequence[Tokens]]:
    """Return the tokenizer and the tokens of each source of prepared data, or of the data that a run trains on, after
    their checksums have been verified. Raises a UserError for a folder that is neither."""
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
    texts: Mapping[str, Sequence[str]],
    results: Mapping[str, Mapping[str, TaskResult]],
    data: tuple[Tokenizer, Sequence[Tokens]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Return a row for each model and task: the share of its questions that were found in the data, the number of those
    that are too short to be found, and the score without those that were found. `texts` are the questions of each task,
    `results` the results of each model."""
    from onward.evaluation.contamination import N, contaminated

    tokenizer, sources = data
    total = sum(map(len, sources))
    items = {task: [tokenizer.encode(text, special=False) for text in several] for task, several in texts.items()}
    every = [item for several in items.values() for item in several]
    found = iter(contaminated(every, sources, lambda done: progress("training tokens", done, total)))
    dirty = {task: [next(found) for _ in several] for task, several in items.items()}
    rows = []
    for model, by_task in results.items():
        for task, result in by_task.items():
            clean = [right for right, flag in zip(result.right, dirty[task], strict=True) if not flag]
            rows.append(
                {
                    "model": model,
                    "task": task,
                    "contaminated": fmean(dirty[task]),
                    "too_short": sum(len(item) < N for item in items[task]),
                    "score": result.score,
                    "score_without": fmean(clean) if clean else None,
                    "questions_without": len(clean),
                }
            )
    return rows
