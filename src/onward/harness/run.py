"""Runs tasks of lm-evaluation-harness on an Onward model, one after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import isclose
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from lm_eval import simple_evaluate
from lm_eval.config.task import TaskConfig
from lm_eval.tasks import TaskManager

from onward.api.language_model import LanguageModel
from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.data.progress import Progress, silent
from onward.evaluation.contamination import GradedQuestions
from onward.evaluation.kept import Kept
from onward.evaluation.tasks import Task
from onward.harness.model import HarnessModel

KEYS = frozenset(field.name for field in fields(TaskConfig)) | {"include", "class", "dataset_name"}
GROUP = frozenset({"group", "task_list"})  # keys of a file that defines a group or a list of tasks
REPOSITORY = re.compile(r"'?([\w.-]+/[\w.-]+)'? (?:on the Hub|is not cached|doesn't exist)|dataset '([^']+)'")
ENDINGS = ".yaml", ".yml"


@dataclass(frozen=True)
class HarnessResults:
    """Rows (task, metric, score, error, examples), errors of failed tasks, and graded questions."""

    rows: list[dict[str, Any]]
    failures: dict[str, str]
    graded: list[GradedQuestions]  # grades of metrics that are means over questions, if requested


def run_harness(
    lm: LanguageModel,
    tasks: Sequence[str],
    *,
    examples: int,
    limit: int,
    chat: bool = False,
    graded: bool = False,
    kept: Kept | None = None,
    progress: Progress = silent,
) -> HarnessResults:
    """Run tasks of lm-evaluation-harness, given by name or as .yaml files, on a model.

    `limit` is the maximum number of questions per task, `examples` the number of solved examples before each question
    (0: the task's own number); with `chat`, questions are asked in the chat template. With `graded`, the questions and
    their grades are also returned. `kept` stores results: requests that it contains are not computed again. Raises a
    UserError for an unknown name.
    """
    manager = TaskManager(include_defaults=not all(task.endswith(ENDINGS) for task in tasks))
    known = set(manager.all_tasks)
    for task in tasks:
        if not task.endswith(ENDINGS) and task not in known:
            near = nearest(task, known | Task.choices().keys())
            raise UserError(f"{task!r:.60} is not a task of Onward or of lm-evaluation-harness: {near}")
    rows, failures = list[dict[str, Any]](), dict[str, str]()
    questions: list[GradedQuestions] = []
    kept = kept or Kept()

    def ask(task: str) -> None:
        # `kept` caches answers by their tokens; the library's cache ignores the weights, and is a database of pickles
        model = HarnessModel(lm, kept=kept, progress=partial(under, task, progress))
        outcome = run_one(model, task, manager, examples, limit, chat, graded)
        own = [row for name, metrics in outcome["results"].items() for row in rows_of(name, metrics, examples)]
        rows.extend(own)
        both = [(row, outcome["samples"].get(row["task"], [])) for row in own]
        questions.extend(one for row, samples in both if graded and (one := graded_of(row, samples)))

    for task in tasks:
        try:
            kept.replicas.together(f"the task {task}", partial(ask, task))
        except UserError as error:
            failures[task] = str(error)
    return HarnessResults(rows, failures, questions)


def under(task: str, progress: Progress, kind: str, done: int, total: int) -> None:
    # with task and progress bound, a callback that ignores the kind of request
    progress(task, done, total)


def run_one(
    model: HarnessModel, task: str, manager: TaskManager, examples: int, limit: int, chat: bool, samples: bool
) -> dict[str, Any]:
    """Run one task or group, by name or as a .yaml file. Raises a UserError for any failure."""
    if task.endswith(ENDINGS):
        check_file(Path(task))
    try:
        outcome = simple_evaluate(
            model,
            tasks=[task],
            num_fewshot=examples or None,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=samples,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            verbosity="ERROR",
        )
    except UserError:
        raise
    except Exception as failure:  # the library raises exceptions of any type
        raise UserError(reason(task, failure)) from failure
    return {"results": {}, "samples": {}, **(outcome or {})}


def rows_of(task: str, metrics: Mapping[str, Any], examples: int) -> list[dict[str, Any]]:
    """A table row for each metric of a task."""
    rows = []
    for name, value in metrics.items():
        metric, _, _ = name.partition(",")
        if isinstance(value, float) and not metric.endswith("_stderr"):
            error = metrics.get(name.replace(metric, f"{metric}_stderr", 1))
            rows.append({"task": task, "metric": metric, "score": value, "error": error, "examples": examples})
    return rows


def graded_of(row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> GradedQuestions | None:
    """The questions that a row summarizes, each with its grade and all texts of its document; None if the metric is not
    a mean of grades."""
    first = [one for one in samples if one["filter"] == samples[0]["filter"]]
    grades = [float(grade) for one in first if isinstance(grade := one.get(row["metric"]), int | float)]
    if not grades or len(grades) < len(first):
        return None
    if not isclose(fmean(grades), row["score"], rel_tol=1e-6, abs_tol=1e-9):
        return None
    name = f"{row['task']}, {row['metric']}"
    return GradedQuestions(name, [tuple(texts_in(one["doc"])) for one in first], grades)


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(inner)


def reason(task: str, failure: Exception) -> str:
    """The error message of a task, with a remedy where one is known."""
    text = " ".join(str(failure).split())[:300] or type(failure).__name__
    if "marked as unsafe" in text:
        return (
            f"Cannot run {task}, which runs generated programs without a sandbox: use --tasks programs:FILE --run-code"
        )
    if (repository := REPOSITORY.search(text)) and isinstance(failure, OSError):
        from datasets import config

        return (
            f"Cannot run {task}, because {repository[1] or repository[2]} of the Hugging Face hub is not in "
            f"{config.HF_DATASETS_CACHE} and cannot be downloaded: run the task once with a "
            "network, or copy that folder from a machine that has it"
        )
    return f"lm-evaluation-harness cannot run {task}: {text}"


def check_file(file: Path) -> None:
    """Raise a UserError, which names the line if it is known, for an unreadable file, one that is not a YAML mapping,
    or an unknown key."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{file}, line {line}: {error.problem or 'this is not YAML'}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"Cannot read {file} ({' '.join(str(error).split())}): give a YAML file") from None
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{file} defines no task: write `task: NAME` and the other fields, one per line")
    keys = {str(key.value): key.start_mark.line + 1 for key, _ in root.value}
    if GROUP & keys.keys():
        return
    for key, line in keys.items():
        if key not in KEYS:
            raise UserError(f"{file}, line {line}: {key} is not a field of a task: {nearest(key, KEYS)}")
