"""Written answers: metrics equal those of the libraries, programs run in a sandbox, a judge grades."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward import Kept, LanguageModel, UserError
from onward.cli import main
from onward.evaluation.tasks import tasks_of
from onward.evaluation.tasks.files import Answers
from onward.evaluation.tasks.judged import Judged
from onward.evaluation.tasks.programs import Programs, pass_at, program_of

from support.judge import Server, judge_server

WRITTEN = ["the cat sat on the mat", "a dog ran home today", "", "running dogs"]
REFERENCES = [["the cat sat on a mat", "a cat sat down"], ["a dog ran home"], ["nothing"], ["dogs run", "running dog"]]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def graded(tmp_path: Path, match: Any) -> tuple[list[float], Any]:
    """The grades that a task gives to WRITTEN, and their total."""
    rows = [{"question": "q", "answer": some} for some in REFERENCES]
    task = Answers(str(write(tmp_path / "rows.jsonl", rows)), match)
    questions = task.questions(9)
    grades = task.grades([[text] for text in WRITTEN], questions, Kept())
    return grades, task.total(WRITTEN, questions, grades)


def test_bleu_and_chrf_are_those_of_sacrebleu(tmp_path: Path) -> None:
    sacrebleu = pytest.importorskip("sacrebleu", reason="needs the extra eval")
    streams = [list(stream) for stream in itertools.zip_longest(*REFERENCES)]
    grades, total = graded(tmp_path, "bleu")
    assert total.score == sacrebleu.corpus_bleu(WRITTEN, streams).score > 10
    assert grades == [sacrebleu.sentence_bleu(text, some).score for text, some in zip(WRITTEN, REFERENCES)]
    grades, total = graded(tmp_path, "chrf")
    assert total.score == sacrebleu.corpus_chrf(WRITTEN, streams).score > 10
    assert grades == [sacrebleu.sentence_chrf(text, some).score for text, some in zip(WRITTEN, REFERENCES)]
    assert 1 < total.error < 50


@pytest.mark.parametrize("metric", ["rouge1", "rouge2", "rougeL"])
def test_rouge_is_that_of_rouge_score(metric: str, tmp_path: Path) -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="needs the extra eval")
    scorer = rouge_scorer.RougeScorer([metric])
    grades, total = graded(tmp_path, metric)
    assert grades == [scorer.score_multi(some, text)[metric].fmeasure for text, some in zip(WRITTEN, REFERENCES)]
    assert total.score == pytest.approx(sum(grades) / 4)
    assert 0 < total.score < 1


def test_an_answer_may_be_one_of_several(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": ["four", "4"]}])
    task = Answers(str(file))
    (question,) = task.questions(1)
    assert [task.is_right(text, question) for text in ("4", "four", "five")] == [True, True, False]
    assert question.solved == "q four"


@pytest.mark.parametrize(("samples", "right"), [(4, 0), (4, 1), (4, 3), (5, 5)])
def test_pass_at_k_is_the_mean_over_all_draws(samples: int, right: int) -> None:
    """A set of k programs counts as passed if one of them passes (Chen et al. 2021)."""
    for k in range(1, samples + 1):
        draws = [min(draw) < right for draw in itertools.combinations(range(samples), k)]
        assert pass_at(k, samples, right) == pytest.approx(sum(draws) / len(draws))


def test_programs_are_run_with_their_tests(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "def f(x):\n", "test": "assert f(2) == 4"},
        {"prompt": "def g(x):\n", "test": ["def check(g):", "    assert g(1) == 3"], "entry_point": "g"},
    ]
    task = Programs(str(write(tmp_path / "rows.jsonl", rows)), samples=2, temperature=0.8, seconds=5.0)
    first, second = questions = task.questions(9)
    network = "    import socket\n    socket.socket()\n    return 3"
    answers = [["    return 2 * x", "    return x"], ["```python\ndef g(x):\n    return 3\n```", network]]
    kept = Kept()
    assert task.grades(answers, questions, kept) == [0.5, 0.5]
    assert [k.label for k in task.parts()] == ["programs(rows.jsonl), pass@1"]
    assert Programs(task.file, samples=2, k=2, temperature=0.8, seconds=5.0).grades(answers, questions, kept) == [1, 1]
    assert len(kept.results) == 4, "each program is run once"
    assert program_of(first.context, "    return 1") == "def f(x):\n    return 1"
    assert second.accepted == ("def check(g):\n    assert g(1) == 3\ncheck(g)\n",)


def test_programs_are_written_and_run_only_if_allowed(lm: LanguageModel, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": "def f():\n    return 1\n#", "test": "assert f() == 1"}] * 2)
    tasks = f"programs(file='{file}', samples=10, temperature=0.5, tokens=3)"
    with pytest.raises(UserError, match="allow it with --run-code"):
        lm.evaluate_tasks(tasks)
    found = lm.evaluate_tasks(tasks, run_code=True, limit=1)
    assert [(one.task, one.questions) for one in found] == [(f"programs(rows.jsonl), pass@{k}", 1) for k in (1, 10)]
    assert main(["evaluate", "--tasks", f"programs:{file}", "--limit", "1"]) == 2


WRONG = {
    "programs(file=a, samples=2)": "all are equal at temperature 0",
    "programs(file=a, samples=2, k=3, temperature=1)": "give samples=3",
    "judged(file=a, url=localhost, model=m)": "give an address such as",
    "judged(file=a, url='http://a', model=m, prompt=x)": "write {answer} where",
    "answers(file=a, match=blue)": "did you mean",
}


@pytest.mark.parametrize("tasks", WRONG)
def test_wrong_options_are_one_sentence(tasks: str) -> None:
    with pytest.raises(UserError, match=WRONG[tasks].replace("{", r"\{")):
        tasks_of(tasks)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with judge_server(monkeypatch) as server:
        yield server


def test_a_judge_grades_answers_once(server: Server, tmp_path: Path) -> None:
    server.replies = [(200, lambda text: "9" if "sat" in text else "2")]
    file = write(tmp_path / "rows.jsonl", [{"question": f"Where is {name}?", "answer": "Here"} for name in "abc"])
    task = Judged(str(file), f"http://127.0.0.1:{server.server_port}/v1", "m")
    questions, answers, kept = task.questions(9), [["it sat"], [" ran"], ["sat"]], Kept()
    assert task.grades(answers, questions, kept) == [0.9, 0.2, 0.9]
    assert task.grades(answers, questions, kept) == [0.9, 0.2, 0.9]
    assert len(server.requests) == 3
    asked = server.requests[0][2]["messages"][0]["content"]
    assert all(text in asked for text in ("Where is ", "Reference:\nHere", "Answer:\n"))


def test_options_of_the_command_are_tasks(
    server: Server, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server.replies = [(200, "5")]
    choices = write(tmp_path / "c.jsonl", [{"question": "The", "choices": ["cat", "dog"], "answer": "dog"}])
    (tmp_path / "a.csv").write_text("question,answer\nThe,cat\n")
    words = ["evaluate", str(tiny_run), "--choices", str(choices), "--answers", str(tmp_path / "a.csv"), "--json"]
    assert main([*words, "--match", "contains"]) == 0
    labels = [row["task"] for row in json.loads(capsys.readouterr().out)["results"]]
    assert labels == ["choices(c.jsonl)", "answers(a.csv, match=contains)"]
    assert main([*words, "--judge", f"http://127.0.0.1:{server.server_port}/v1", "--judge-model", "m"]) == 0
    printed = capsys.readouterr()
    assert [row["score"] for row in json.loads(printed.out)["results"]][1] == 0.5
    assert "2 answers were reused" in printed.err
    assert main([*words, "--judge", "http://127.0.0.1:9/v1"]) == 2
    assert "name its model with --judge-model" in capsys.readouterr().err


def test_examples_that_do_not_fit_are_counted(lm: LanguageModel, tmp_path: Path) -> None:
    rows = [{"question": "The cat", "choices": ["sat", "ran"], "answer": "sat"}] * 40
    file = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=r"its 20 examples, .* context has room for 32: .*\(\d fit\)") as refused:
        lm.evaluate_tasks(f"choices:{file}", examples=20)
    fit = int(str(refused.value).rpartition("(")[2][0])
    assert lm.evaluate_tasks(f"choices:{file}", examples=fit, limit=2)[0].questions == 2
    with pytest.raises(UserError, match="fit"):
        lm.evaluate_tasks(f"choices:{file}", examples=fit + 1, limit=2)
    with pytest.raises(UserError, match="it is too long even without examples"):
        lm.evaluate_tasks(f"answers(file='{file}', tokens=31)", examples=3)
