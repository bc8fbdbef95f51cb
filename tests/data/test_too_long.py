"""Examples that are too long: cut or left out, and counted by outcome and source, also for validation."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from onward import UserError
from onward.cli import main
from onward.data import Example
from onward.data.examples import TokenSequence
from onward.data.tables import TooLong, TooLongCounts, tabulated

from support.finetuning import base_model, write_rows


def example(prompt: int, *answers: list[int], source: str = "a") -> Example:
    """An example with a prompt of `prompt` tokens and these answers."""
    sequences = [TokenSequence([1] * prompt + answer, [False] * prompt + [True] * len(answer)) for answer in answers]
    return Example(sequences, "line 1", source=source)


CASES: dict[str, tuple[Example, str]] = {  # an example, and its outcome at a maximum length of 5
    "fits": (example(3, [2, 3]), ""),
    "its end is cut": (example(3, [2, 3, 4]), "cut"),
    "its answer is cut off": (example(5, [2, 3]), "lost"),
    "its prompt is too long": (example(9, [2, 3]), "lost"),
    "one answer of a pair is cut off": (example(4, [2, 3], [3]), "cut"),
    "a pair differs": (example(3, [2, 3, 4], [3, 4, 5]), "cut"),
    "a pair is equal once cut": (example(3, [2, 3, 4], [2, 3, 5]), "equal"),
    "a longer answer of a pair is equal once cut": (example(3, [2, 3], [2, 3, 5]), "equal"),
    "a pair loses both answers": (example(5, [2], [3]), "lost"),
}


@pytest.mark.parametrize("case", CASES)
def test_examples_are_counted_by_their_loss(case: str) -> None:
    one, way = CASES[case]
    fits = example(1, *([[2]] * len(one.sequences)), source="b")
    table, left = tabulated([fits, one], 5, "cut")
    assert left.sources["a"] == TooLongCounts(1, bool(way), **({way: 1} if way else {}))
    assert left.sources["b"] == TooLongCounts(1)
    assert len(table) == 1 + (way in ("", "cut"))
    dropped, left = tabulated([fits, one], 5, "drop")
    assert left.sources["a"] == TooLongCounts(1, bool(way), dropped=int(bool(way)))
    assert len(dropped) == 1 + (not way)
    if way:
        with pytest.raises(UserError, match="1 of 2 examples are longer than 5 tokens"):
            tabulated([fits, one], 5, "error")


def test_counts_add_up_and_no_pair_is_equal() -> None:
    draw, ways = random.Random(1), ("cut", "lost", "equal", "dropped")
    for _ in range(100):
        answers = lambda: [[draw.choice([2, 3]) for _ in range(draw.randint(1, 6))] for _ in range(2)]
        pairs = [both for both in (answers() for _ in range(12)) if both[0] != both[1]]
        made = [example(draw.randint(1, 6), *both, source=draw.choice("ab")) for both in pairs]
        how: TooLong = draw.choice(["cut", "drop"])
        fits = example(1, [2], [3])
        table, left = tabulated([fits, *made], 6, how)
        for counts in left.sources.values():
            assert counts.longer == sum(getattr(counts, way) for way in ways)
        out = sum(one.lost + one.equal + one.dropped for one in left.sources.values())
        assert len(table) == sum(one.examples for one in left.sources.values()) - out
        assert left.count == sum(max(len(s.tokens) for s in one.sequences) > 6 for one in made)
        for i in range(len(table)):
            assert table.sequence(2 * i).tokens != table.sequence(2 * i + 1).tokens


SUMMED = {"text": "what is the sum"}
LONG = {"prompt": "what is the sum? " * 2, "completion": "eleven, or eleven " * 20}
LOST = {"prompt": "what is the sum? " * 20, "completion": "eleven"}
PAIR = {"prompt": "2 + 3?", "chosen": "It is 5.", "rejected": "It is 6."}
EQUAL = {"prompt": "2 + 3?", "chosen": "It is " * 40 + "5.", "rejected": "It is " * 40 + "6."}


def finetune(place: Path, base: Path, files: dict[str, list[Any]], words: str) -> int:
    for name, rows in files.items():
        write_rows(place / name, rows)
    train = [name for name in files if name != "held.jsonl"]
    argv = ["finetune", str(base), *train, "--out", "run", "--steps", "1", "--length", "32", "--device", "cpu"]
    return main([*argv, "--validation", "held.jsonl" if "held.jsonl" in files else "none", *words.split()])


def test_run_says_what_was_cut_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = base_model(tmp_path / "base")
    files = {"a.jsonl": [SUMMED, LONG, LOST, LOST], "b.jsonl": [SUMMED], "held.jsonl": [LONG, SUMMED]}
    assert finetune(tmp_path, base, files, "--too-long cut") == 0
    lines = " ".join(capsys.readouterr().err.split())
    first = "a.jsonl: 3 of 4 examples exceed the length of 32 tokens: 1 cut to it, 2 left out, because their answers"
    held = "held.jsonl: 1 of 2 examples exceed the length of 32 tokens: 1 cut to it"
    assert first in lines
    assert held in lines
    assert "b.jsonl: 0 of" not in lines
    record = json.loads((tmp_path / "run" / "inputs.json").read_text())
    counts = {"examples": 4, "longer": 3, "cut": 1, "lost": 2, "equal": 0, "dropped": 0}
    assert record["too_long"]["train"]["a.jsonl"] == counts
    assert record["too_long"]["train"]["b.jsonl"]["longer"] == 0
    assert record["too_long"]["validation"]["held.jsonl"]["cut"] == 1
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert first in page
    assert held in page


def test_run_says_what_was_dropped_and_which_pairs_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = base_model(tmp_path / "base")
    assert finetune(tmp_path, base, {"a.jsonl": [SUMMED, LONG, LOST]}, "--too-long drop") == 0
    assert "2 of 3 examples exceed the length of 32 tokens: 2 left out" in " ".join(capsys.readouterr().err.split())
    words = "--too-long cut --method dpo --out pairs"
    assert finetune(tmp_path, base, {"a.jsonl": [PAIR, EQUAL]}, words) == 0
    said = "1 of 2 examples exceed the length of 32 tokens: 1 left out, because both answers would be equal after cut"
    assert said in " ".join(capsys.readouterr().err.split())
    assert finetune(tmp_path, base, {"a.jsonl": [EQUAL]}, f"{words}2") == 2
    assert "there is no example to train on, because all are too long" in " ".join(capsys.readouterr().err.split())
