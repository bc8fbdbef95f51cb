"""`onward evaluate --tasks`: scores of tasks, and two models compared question by question."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.cli.shared.contamination import contamination_rows, training_data
from onward.cli.shared.loading import Loading, cache_folder, load
from onward.cli.shared.output import console, print_json, print_table
from onward.cli.shared.progress import progress_bars
from onward.errors import UserError

if TYPE_CHECKING:
    from onward.evaluation.benchmark import TaskResult
    from onward.evaluation.contamination import GradedQuestions
    from onward.evaluation.kept import Kept
    from onward.evaluation.tasks import Task
    from onward.language_model import LanguageModel
    from onward.reports.runs.scores import TaskScore

QUICK = "cloze, words, copying, brackets, arithmetic, mapping"
Results = dict[str, "TaskResult"]  # by task


@dataclass(frozen=True)
class Exam:
    """The tasks to run, those of lm-evaluation-harness by name, and the numbers of examples and of questions."""

    tasks: Sequence[Task]
    foreign: Sequence[str]  # tasks of lm-evaluation-harness
    examples: int
    limit: int
    against: str = ""  # training data that is searched for the questions
    chat: bool = False  # ask questions in the chat template
    run_code: bool = False  # run programs that the model writes
    keep: bool = True  # store answers, and reuse stored ones


def evaluate_tasks(models: Sequence[str], loading: Loading, exam: Exam, as_json: bool) -> None:
    """Evaluate models on tasks and print their scores, as tables or with `as_json` as JSON, and the differences of the
    others to the first. Raises a UserError, after the other results are printed, if a task failed."""
    from onward.reports.runs.scores import scores_of

    failures: dict[str, str] = {}
    foreign: list[dict[str, Any]] = []
    data = training_data(exam.against) if exam.against else None
    graded: dict[str, list[GradedQuestions]] = {model: [] for model in models}
    results = {model: run_all(model, loading, exam, failures, foreign, graded[model]) for model in models}
    rows = [{"model": model} | row(result) for model, by_task in results.items() for result in by_task.values()]
    scores = {model: scores_of(exam.tasks, [*by_task.values()], step_of(model)) for model, by_task in results.items()}
    core = [
        {"model": model, "core": one.score, "error": one.error, "questions": one.questions}
        for model, own in scores.items()
        for one in own
        if one.metric == "centered"
    ]
    for model, own in scores.items() if not exam.chat else ():
        of_harness = harness_scores(step_of(model), [row for row in foreign if row["model"] == model])
        keep(model, loading, [*own, *of_harness])
    first, *others = results
    differences = [one for other in others for one in compared(results[first], other, results[other])]
    dirty = []
    if data:
        for model, by_task in results.items():
            graded[model] += [
                graded_questions(task, by_task[task.label], exam) for task in exam.tasks if task.label in by_task
            ]
        with progress_bars(counted=True) as show:
            dirty = contamination_rows(graded, data, show)
    if as_json:
        right = {model: {task: one.right for task, one in by_task.items()} for model, by_task in results.items()}
        print_json(
            {
                "results": rows,
                "core": core,
                "contamination": dirty,
                "harness": foreign,
                "differences": differences,
                "right": right,
                "failures": failures,
            }
        )
    else:
        better = f"\nbetter than {first}, on the same questions"
        trained_on = f"\nquestions with 13 tokens in a row that are in the training tokens of {exam.against}"
        tables = (rows, ""), (core, "\nCORE"), (foreign, ""), (dirty, trained_on), (differences, better)
        for table, title in tables:
            if table:
                print(title, end="\n" if title else "")
                columns = dict.fromkeys((name for one in table for name in one), "")
                print_table([columns | one for one in table])
    if failures:
        for other, message in [*failures.items()][1:]:
            console.print(f"{other}: {message}", markup=False, soft_wrap=True)
        task, message = next(iter(failures.items()))
        raise UserError(
            f"{len(failures)} of {len(exam.tasks) + len(exam.foreign)} tasks failed, such as {task}: {message}"
        )


def run_all(
    model: str,
    loading: Loading,
    exam: Exam,
    failures: dict[str, str],
    foreign: list[dict[str, Any]],
    graded: list[GradedQuestions],
) -> Results:
    """Return the results of a model by task. Rows of lm-evaluation-harness are added to `foreign`, its questions to
    `graded` if they are looked for in training data, and the messages of tasks that failed to `failures`."""
    lm, results = load(model, loading), Results()
    with kept_answers(lm, exam.keep) as kept, progress_bars(counted=True) as show:
        asked: dict[str, Any] = {
            "examples": exam.examples,
            "limit": exam.limit,
            "chat": exam.chat,
            "kept": kept,
            "progress": show,
        }
        for task in exam.tasks:
            try:
                (results[task.label],) = lm.evaluate_tasks([task], run_code=exam.run_code, **asked)
            except UserError as error:
                failures[task.label] = str(error)
        if exam.foreign:
            from onward.harness import run_harness

            try:
                outcome = run_harness(lm, exam.foreign, graded=bool(exam.against), **asked)
                graded += outcome.graded
                foreign += [{"model": model} | row for row in outcome.rows]
                failures |= outcome.failures
            except UserError as error:
                failures[", ".join(exam.foreign)] = str(error)
    return results


@contextmanager
def kept_answers(lm: LanguageModel, keep: bool) -> Iterator[Kept]:
    """Yield the kept answers of a model, in the user's cache if `keep`. Ctrl-C inside the `with` block ends the process
    and says how to go on."""
    from onward.evaluation.kept import Kept, kept_for

    folder = cache_folder("answers") if keep else None
    kept = kept_for(lm.model, lm.text(), folder) if folder else Kept()

    def end(*_: object) -> None:
        go_on = f"; {len(kept.results):,} answers are kept in {kept.file}, and the same command continues from there"
        os.write(2, f"\nonward: interrupted{go_on if kept.file else ''}\n".encode())
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    try:
        yield kept
    finally:
        signal.signal(signal.SIGINT, before)
        kept.close()
    if kept.file and kept.reused:
        console.print(
            f"{kept.reused:,} answers were reused from {kept.file}; --no-keep asks again",
            markup=False,
            soft_wrap=True,
        )


def row(result: TaskResult) -> dict[str, Any]:
    """Return a result as a row of the table."""
    values = asdict(result)
    del values["right"]
    values = {name: value for name, value in values.items() if value is not None}
    return values | {"error": None if math.isnan(result.error) else result.error, "questions": result.questions}


def own_tasks(lm: LanguageModel, text: str) -> list[TaskResult]:
    """Return the results of a model at the tasks of QUICK, about the validation text of its run. A task for which the
    text is too short is left out, and named on standard error."""
    from onward.evaluation.tasks.task import tasks_of, with_text

    results: list[TaskResult] = []
    with progress_bars(counted=True) as show:
        for task in with_text(tasks_of(QUICK), text):
            try:
                results += lm.evaluate_tasks([task], progress=show)
            except UserError as error:
                console.print(f"without the task {task.label}: {error}", markup=False, soft_wrap=True)
    return results


def graded_questions(task: Task, result: TaskResult, exam: Exam) -> GradedQuestions:
    """Return the questions of a task, each with its right answer, and their grades."""
    from onward.evaluation.contamination import GradedQuestions

    texts = [(text,) for text in task.texts(exam.limit, exam.examples)]
    return GradedQuestions(task.label, texts, result.right)


def harness_scores(step: int, rows: Sequence[Mapping[str, Any]]) -> list[TaskScore]:
    """Return rows of lm-evaluation-harness as scores of the weights of a step."""
    from onward.reports.runs.scores import TaskScore

    suite = "lm-evaluation-harness"
    return [
        TaskScore(step, row["task"], row["score"], row["metric"], suite, error, examples=row["examples"])
        for row in rows
        for error in [row["error"] if isinstance(row["error"], float) else None]
    ]


def keep(model: str, loading: Loading, scores: Sequence[TaskScore]) -> None:
    """Keep scores in the folder of a run, for its report card. Scores of weights that were changed on loading, and of
    a model without a run, are not kept."""
    from onward.reports.runs.scores import keep_scores

    as_saved = not (loading.quantize or loading.dtype or loading.adapter_folder or loading.rope)
    if as_saved and (Path(model) / "run.json").exists():
        keep_scores(Path(model), scores)


def step_of(model: str) -> int:
    """Return the step of a run whose weights are in its folder; 0 for a model without a run."""
    from onward.reports.runs.record import Record

    return Record(Path(model)).figures().step


def compared(ours: Results, other: str, theirs: Results) -> list[dict[str, Any]]:
    """Return a row for each task: by how much the model `other` is better than ours, with an interval of 95 %,
    McNemar's p-value corrected for the number of tasks (Holm), and the smallest difference that so many questions
    show."""
    from onward.evaluation.significance import bootstrap, holm, mcnemar, smallest_difference

    both = [task for task in ours if task in theirs]
    corrected = holm([mcnemar(theirs[task].right, ours[task].right) for task in both])
    rows = []
    for task, p in zip(both, corrected):
        pair = theirs[task].right, ours[task].right
        estimate, least = bootstrap(*pair), smallest_difference(*pair)
        figures: dict[str, Any] = {"difference": estimate.mean, "low": estimate.low, "high": estimate.high, "p": p}
        figures["smallest_shown"] = None if math.isnan(least) else least
        rows.append({"model": other, "task": task, **figures, "more_than_noise": p < 0.05})
    return rows
