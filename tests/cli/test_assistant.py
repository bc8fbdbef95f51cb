"""`onward assistant`, from documents to an evaluated adapter, and the functions that create its examples."""

import json
from pathlib import Path

import pytest

import onward
from onward.cli import main
from onward.data.passages import Passage, passages, question_in, shortened

DOCUMENT = """A beginning that is long enough to be a passage.

# 1. Birds

## Short
too short
## How do owls see
Owls see well in the dark, and code stays whole:

```
# no heading
owl()
```
## Food
They eat mice, and they eat them whole, every night.
"""


def test_passages_stand_under_their_headings() -> None:
    first, owls, food = passages([("a.md", DOCUMENT)])
    assert (first.headings, first.question) == ((), "What does a.md say?")
    assert (owls.headings, owls.question) == (("Birds", "How do owls see"), "How do owls see?")
    assert owls.text.endswith("```\n# no heading\nowl()\n```")
    assert (food.place, food.question) == ("a.md#Food", "What is said about Food in Birds?")


@pytest.mark.parametrize(
    ("text", "room", "cut"),
    [
        ("one\n\ntwo", 5, "one"),
        ("one two", 5, "one"),
        ("One. Two. Three", 10, "One. Two"),
        ("a\n\n```\nb\n\nc\n```", 9, "a\n\n```\nb\n```"),
        ("word", 3, ""),
    ],
)
def test_answers_are_cut_at_a_boundary(text: str, room: int, cut: str) -> None:
    assert shortened(text, lambda part: len(part) <= room) == cut


def test_question_is_found_in_a_reply() -> None:
    assert question_in('Sure!\n"What do owls eat?"\n') == "What do owls eat?"
    assert question_in("I cannot.") is question_in("Eh?") is None
    assert Passage("a", (), "").place == "a"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny byte-level model whose context is long enough for a paragraph."""
    tokenizer = onward.train_tokenizer("byte", [])
    config = onward.DecoderConfig(tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, context_length=512)
    folder = tmp_path_factory.mktemp("base") / "base"
    onward.save(onward.LanguageModel(onward.Decoder(config), tokenizer), folder)
    return folder


def test_assistant_is_made_of_a_folder_continues_and_refuses_other_options(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "docs").mkdir()
    for i in range(2):
        page = f"<html><body><h1>Cats {i}</h1><p>{'The cat sat on the mat. ' * 3}{i}</p></body></html>"
        (tmp_path / f"docs/{i}.html").write_text(page)
    words = ["assistant", str(tmp_path / "docs"), "--base", str(base), "--out", str(tmp_path / "out"), "--json"]
    words += ["--quantize", "none", "--time", "1s"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "text of 2 HTML documents" in said.err
    result = json.loads(said.out)
    assert [row["model"] for row in result["evaluation"]["results"]] == [str(base), str(tmp_path / "out/adapter")]
    assert (result["examples"]["examples"], result["examples"]["held_out"]) == (1, 1)
    assert [line.split()[2] for line in said.err.splitlines() if line.startswith("$ onward ")] == [
        *("finetune", "evaluate", "evaluate")
    ]
    assert "Cats 1" in (tmp_path / "out/answers.html").read_text()
    row = json.loads((tmp_path / "out/held-out.jsonl").read_text())
    assert row["messages"][1]["content"].endswith(f"Source: {tmp_path / 'docs/1.html'}#Cats 1")
    assert main(words) == 0  # everything except the evaluation has been done before
    assert json.loads(capsys.readouterr().out)["training"] == result["training"]
    assert main([*words, "--lora", "4"]) == 2
    assert "was begun with another lora: give the same values, or another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base", "x"], "no documents: name their folder"),
        (["docs"], "no model to start from: name one with --base"),
        (["nowhere", "--base", "RUN"], "nowhere does not exist"),
        (["empty.md", "--base", "RUN"], "fewer than two passages"),
        (["empty.md", "--base", "RUN", "--judge", "http://h/v1"], "name its model with --judge-model"),
        (["empty.md", "--base", "RUN", "--time", "abc"], "--time is 'abc'"),
        (["empty.md", "--base", "RUN", "--learning-rate", "-1"], "--learning-rate is -1.0"),
    ],
)
def test_assistant_names_a_mistake_and_leaves_nothing(
    words: list[str], message: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.md").write_text("word")
    given = [str(base) if one == "RUN" else str(tmp_path / one) if one == "empty.md" else one for one in words]
    assert main(["assistant", *given, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
