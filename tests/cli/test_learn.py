"""onward learn and onward help."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from onward.cli import main
from onward.learn.chapters import PAGES, chapters, find_chapter


def test_learn_lists_the_chapters_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn"]) == 0
    out = capsys.readouterr().out
    assert [chapter.number for chapter in chapters()] == sorted(chapter.number for chapter in chapters())
    assert all(chapter.title in out and chapter.about in out and chapter.part in out for chapter in chapters())


def test_every_chapter_has_its_number_in_file_and_heading() -> None:
    assert all(int(chapter.path.name[:2]) == chapter.number for chapter in chapters())
    assert all(chapter.about for chapter in chapters())


def test_a_quiz_ends_each_part_of_the_course() -> None:
    parts = [[*own] for _, own in groupby(chapters(), lambda chapter: chapter.part)]
    quizzes = [f"## Quiz: chapters {own[0].number} to {own[-1].number}" for own in parts]
    assert all(quiz in own[-1].text for quiz, own in zip(quizzes, parts))


def test_learn_shows_answers_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "7"]) == 0
    out = capsys.readouterr().out
    assert "What is its perplexity?" in out
    assert "Answer" not in out
    assert "exp(2.0)" not in out
    assert out.count("onward learn 7 --answers") == 1


def test_learn_shows_a_chapter_with_answers_and_without_html(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "1", "--answers"]) == 0
    out = capsys.readouterr().out
    assert "Answer" in out
    assert "ln 100" in out
    assert "--answers" not in out
    assert "01-tokens.svg" in out
    assert "<details>" not in out
    assert "<!--" not in out


def test_a_chapter_becomes_a_page_that_needs_no_other_file(tmp_path: Path) -> None:
    page = tmp_path / "chapter.html"
    assert main(["learn", "1", "--web", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert 'src="data:image/svg+xml;base64,' in text
    assert text.count("<details>") == find_chapter("1").text.count("<details>")
    assert ".svg" not in text.replace("--out 01-tokens.svg", "")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a course's only chapter, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onward.learn.chapters.PAGES", tmp_path)
    chapters.cache_clear()
    yield tmp_path / "01-small.md"
    chapters.cache_clear()


def test_run_shows_each_block_and_its_output(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.write_text("# 1. Small\n\n```python\nprint(6 * 7)\n```\n\n```sh\nonward help softmax\n```\n", "utf-8")
    assert main(["learn", "1", "--run"]) == 0
    out = capsys.readouterr().out
    assert "print(6 * 7)" in out
    assert "\n42\n" in out
    assert "probabilities" in out


def test_run_stops_at_a_command_that_is_refused(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.write_text("# 1. Small\n\n```sh\nonward report no\n```\n\n```python\nprint(6 * 7)\n```\n", "utf-8")
    assert main(["learn", "1", "--run"]) == 2
    out, err = capsys.readouterr()
    assert "42" not in out
    assert "chapter 1 stops here" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("learn 99", "there is no chapter 99: choose 1"),
        ("learn a", "there is no chapter a: choose 1"),
        ("learn transfomer", "there is no chapter transfomer: did you mean Transformer"),
        ("draw kv-cache", "'kv-cache' is not an idea to draw: did you mean cache?"),
        ("draw rotary", "'rotary' is not an idea to draw: did you mean rope?"),
        ("learn qqqq", "--chapter"),
        ("learn --run", "run is used only with chapter"),
        ("learn 1 --run --web a.html", "--run and --web cannot be combined: choose one"),
        ("learn 1 --run --web a.html --notebook a.ipynb", "--run and --web and --notebook cannot be combined"),
        ("help nuclues", "'nuclues' is not in the glossary: did you mean nucleus"),
        ("help qqqqqq", "onward learn lists the chapters"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message.removeprefix("--chapter") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("nucleus", "onward.Sampling.top_p"),
        ("CausalSelfAttention", "sees only itself and earlier tokens"),
        ("gradient checkpointing", "onward train --recompute"),
        ("Pre-LN", "pre-norm"),
    ],
)
def test_help_explains_a_term_by_any_of_its_names(words: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *words.split()]) == 0
    assert shown in capsys.readouterr().out


def test_help_of_a_command_names_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "train"]) == 0
    assert "onward train --help" in capsys.readouterr().out


def test_the_pages_lie_in_the_package() -> None:
    assert PAGES.is_dir()
    assert (PAGES / "01-next-tokens.md").is_file()
