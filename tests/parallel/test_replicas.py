"""Evaluation divided over two processes: figures, scores and stored answers equal those of one process."""

import json
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Decoder, Kept, UserError
from onward.cli import main
from onward.data import Record
from onward.evaluation import continuations
from onward.evaluation.continuations import Pair, score_continuations
from onward.evaluation.heads import evaluate_head, examples_of
from onward.parallel.processes import Processes
from onward.transforms import add_head
from onward.transforms.heads import head_of

from support.decoders import DECODERS
from support.finetuning import tokenizer
from support.harness_tasks import task_file
from support.ranks import Ranks


@pytest.fixture(scope="module")
def files(story_file: Path, tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The words of CASES: paths and tasks."""
    folder = tmp_path_factory.mktemp("questions")
    for name in "run", "other":
        shutil.copytree(tiny_run, folder / name)
    choices = [{"question": f"The {i} cat sat on the", "choices": ["mat", "hill"], "answer": "mat"} for i in range(9)]
    answers = [{"question": f"The {i} cat", "answer": "sat"} for i in range(5)]
    for name, rows in ("choices", choices), ("answers", answers):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {name: str(folder / f"{name}.jsonl") for name in ("choices", "answers")}
    paths |= {"text": str(story_file), "run": str(folder / "run"), "other": str(folder / "other")}
    return paths | {"tasks": TASKS.format(**paths), "harness": str(task_file(folder / "choices.jsonl", "mine"))}


def said(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a command in this process: its status, standard output and standard error."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(words)
    return status, out.getvalue(), err.getvalue()


def near(value: Any) -> Any:
    """A value for comparisons in which numbers may differ by 1e-6."""
    if isinstance(value, dict):
        return {name: near(one) for name, one in value.items()}
    if isinstance(value, list):
        return [near(one) for one in value]
    return pytest.approx(value, rel=1e-6, nan_ok=True) if isinstance(value, float) else value


CASES = {
    "a text": "{run} {text} --stride 16",
    "the text of the run": "{run}",
    "two kinds of weights": "{run} {text} --quantize int8",
    "tasks": "{run} --tasks {tasks} --limit 40 --no-keep",
    "two models, and a task that fails": "{run} {other} --tasks copying,words:{choices},brackets --no-keep",
    "a task of the harness": "{run} --tasks {harness},brackets --limit 9 --no-keep",
}
TASKS = (
    "cloze:{text},copying,mapping(shots=4),choices:{choices},answers:{answers},answers(file='{answers}',match='bleu')"
)


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.long] * (one.split()[-1] in ("run", "harness"))) for one in CASES]
)
def test_two_processes_print_the_figures_of_one(case: str, files: dict[str, str], two: Ranks) -> None:
    words = ["evaluate", *(word.format(**files) for word in CASES[case].split()), "--json"]
    status, out, _ = said(words)
    (first, figures, _), (_, *nothing) = two.run(said, words)
    assert json.loads(figures) == near(json.loads(out))
    assert first == status == (2 if "fails" in case else 0)
    assert nothing == ["", ""], "the first process prints"


def head_figures(labels: Sequence[str], rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """The figures of a new head with these labels, from the processes that have joined."""
    torch.manual_seed(0)
    text = tokenizer()
    model = Decoder(replace(DECODERS["llama"], vocab_size=text.vocab_size, context_length=96))
    add_head(model, labels)
    torch.nn.init.normal_(head_of(model).weight)
    examples = examples_of(model, text, [Record(row, "") for row in rows])
    return asdict(evaluate_head(model, examples, Processes.join().replicas))


HEADS: dict[str, tuple[list[str], list[dict[str, str]]]] = {
    "reward": (["reward"], [{"prompt": f"{i}?", "chosen": "a" * i, "rejected": "b"} for i in range(1, 50)]),
    "classifier": (["no", "yes"], [{"text": f"{i}", "label": "no" if i % 3 else "yes"} for i in range(70)]),
}


@pytest.mark.parametrize("head", HEADS)
def test_two_processes_evaluate_a_head_as_one(head: str, two: Ranks) -> None:
    expected = head_figures(*HEADS[head])
    assert two.run(head_figures, *HEADS[head]) == [near(expected)] * 2


def work(outcomes: Sequence[str | UserError]) -> list[Any]:
    """The results of three consecutive computations in this process; `outcomes` contains the outcome of the second one
    for each process."""
    replicas = Processes.join().replicas

    def own() -> str:
        outcome = outcomes[replicas.rank]
        if isinstance(outcome, UserError):
            raise outcome
        return outcome

    try:
        inner = replicas.together("the task", lambda: replicas.together("answers", own))[0]
    except UserError as error:
        inner = [str(error)]
    numbers = replicas.map("squares", lambda number: number**2, range(7))
    return [*inner, numbers, replicas.first("grades", lambda: f"of rank {replicas.rank}")]


@pytest.mark.parametrize("outcomes", [["a", "b"], ["a", UserError("no file")], [UserError("no file")] * 2])
def test_an_error_of_a_process_is_raised_by_all_which_go_on(outcomes: list[Any], two: Ranks) -> None:
    inner = ["no file"] if isinstance(outcomes[1], UserError) else outcomes
    assert two.run(work, outcomes) == [[*inner, [0, 1, 4, 9, 16, 25, 36], "of rank 0"]] * 2


def disagree(first: str, other: str) -> str:
    replicas = Processes.join().replicas
    try:
        replicas.together(other if replicas.rank else first, lambda: None)
    except UserError as error:
        return str(error)
    return ""


def test_processes_with_different_work_are_named(two: Ranks) -> None:
    sentence = "rank 1 computes b, but rank 0 computes a: give all ranks the same model, files and versions"
    assert two.run(disagree, "a", "b") == [sentence] * 2


class Stopped(Exception):
    pass


PAIRS = [Pair(tuple(range(1, 2 + i % 7)), (3, i)) for i in range(100)]


def scored(run: str, folders: Sequence[str], most: int) -> tuple[list[Any], int, int]:
    """The scores of PAIRS, or [] if more than `most` had to be computed; and the number of scores in the rank's folder
    before and after."""
    replicas = Processes.join().replicas
    kept = Kept(Path(folders[replicas.rank]) / "a.jsonl", replicas)

    def stop(done: int) -> None:
        if done > most:
            raise Stopped

    scores: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, suppress(Stopped):
        patch.setattr(continuations, "ROWS", 8)
        scores = score_continuations(onward.load(run).model, PAIRS, stop, kept)
    kept.close()
    return scores, kept.reused, len(Kept(kept.file).results)


@pytest.mark.parametrize("folders", [1, 2], ids=["one disk", "a disk each"])
def test_interrupted_processes_go_on_from_the_answers_of_all(
    folders: int, files: dict[str, str], tmp_path: Path, two: Ranks
) -> None:
    expected, *_ = scored(files["run"], [str(tmp_path / "alone")], 100)
    places = [str(tmp_path / str(rank % folders)) for rank in range(2)]
    both = two.run(scored, files["run"], places, 16)
    assert [one for one, *_ in both] == [[]] * 2
    assert max(count for *_, count in both) == 16 * 2 // folders
    for scores, reused, _ in two.run(scored, files["run"], places, 100):
        assert scores == expected
        assert reused == 32
