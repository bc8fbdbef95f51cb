"""Contamination: the result equals a search for each 13-gram, over sources, shards and chunks; and the command's
report."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import Tokens
from onward.cli import main
from onward.evaluation import contamination
from onward.evaluation.contamination import N, contaminated, rolling_hashes


def plain(item: list[int], sources: list[list[int]]) -> bool:
    """Whether an item shares N consecutive tokens with a source, by comparing all N-grams."""
    grams = {tuple(item[i : i + N]) for i in range(len(item) - N + 1)}
    return any(tuple(one[i : i + N]) in grams for one in sources for i in range(len(one) - N + 1))


token = st.integers(0, 2)  # a small vocabulary gives many near misses
texts = st.lists(token, max_size=60)


@given(sources=st.lists(texts, min_size=1, max_size=3), items=st.lists(texts, max_size=6), data=st.data())
def test_contamination_is_that_of_a_plain_search(
    sources: list[list[int]], items: list[list[int]], data: st.DataObject
) -> None:
    for source in sources:  # add a part of each source as an item
        start = data.draw(st.integers(0, len(source)))
        items = [*items, [7, *source[start : start + data.draw(st.integers(0, 20))], 8]]
    cut = data.draw(st.integers(0, 60))
    shards = [[np.array(part, np.uint16) for part in (one[:cut], one[cut:])] for one in sources]
    tokens = [Tokens.join(map(Tokens.of, parts)) for parts in shards]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contamination, "CHUNK", data.draw(st.integers(1, 30)))
        assert contaminated(items, tokens) == [plain(item, sources) for item in items]


def test_equal_hashes_of_other_tokens_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contamination, "rolling_hashes", lambda tokens: np.zeros(len(tokens) - N + 1, np.uint32))
    data = Tokens.of(np.arange(50, dtype=np.uint16))
    assert contaminated([list(range(20, 33)), [*range(20, 32), 99]], [data]) == [True, False]


def test_a_hash_is_the_polynomial_of_its_tokens() -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 16, 40).astype(np.uint16)
    for i, value in enumerate(rolling_hashes(tokens).tolist()):
        powers = [int(t) * contamination.BASE ** (N - 1 - k) for k, t in enumerate(tokens[i : i + N])]
        assert value == sum(powers) % (1 << 32)


def test_an_item_of_12_tokens_is_clean_and_one_of_13_is_not() -> None:
    data = [Tokens.of(np.arange(100, dtype=np.uint32) + 70_000)]
    assert contaminated([list(range(70_010, 70_022)), list(range(70_010, 70_023)), []], data) == [False, True, False]


@pytest.mark.parametrize("against", ["prepared", "run"])
def test_the_command_reports_questions_that_were_trained_on(
    against: str, tiny_run: Path, story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = story_file.read_text()
    known, new = story[300:420], "Some words that no story has, in an order of their own, and more of these"
    rows = [
        {"question": known[:100], "choices": [known[100:].strip(), "x"], "answer": 0},
        {"question": new, "choices": ["here", "there"], "answer": 0},
        {"question": "The cat", "choices": ["sat", "ran"], "answer": 0},
    ]
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tiny_run if against == "run" else tiny_run / "data"
    if against == "prepared":
        folder = tmp_path / "prepared"
        main(["data", "prepare", str(story_file), "--out", str(folder), "--tokenizer", str(tiny_run)])
    capsys.readouterr()
    words = ["evaluate", str(tiny_run), "--tasks", f"choices:{tmp_path / 'exam.jsonl'}", "--against", str(folder)]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (row,) = printed["contamination"]
    right = printed["right"][str(tiny_run)]["choices(exam.jsonl)"]
    assert (row["contaminated"], row["too_short"], row["questions_without"]) == (pytest.approx(1 / 3), 1, 2)
    assert row["score_without"] == sum(right[1:]) / 2
    assert row["score"] == sum(right) / 3
    assert main(words) == 0
    assert "13 tokens in a row" in capsys.readouterr().out


def test_data_without_tokens_is_one_sentence(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(tiny_run), "--tasks", "copying", "--against", str(tmp_path)]) == 2
    assert "which has no tokens" in capsys.readouterr().err.splitlines()[-1]
    assert main(["evaluate", str(tiny_run), "--against", str(tiny_run)]) == 2
