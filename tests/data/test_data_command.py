"""The command `onward data prepare`: its output, its exit status, its messages."""

import json
import os
import threading
from pathlib import Path

import pytest

from onward.cli import main
from onward.cli.shared.sources import skipped_in
from onward.data import corpora, load_tokens


@pytest.fixture
def place(tmp_path: Path, story: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("story.txt").write_text(story)
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"body": body}) + "\n" for body in ["short", "of \x1b and", "of \x1b and"])
    )
    return tmp_path


def test_prepare_prints_a_report_and_the_next_command(
    place: Path, story: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text().replace("body", "text"))
    words = "data prepare story.txt rows.jsonl --tokenizer char --out prepared/mine --min-words 2"
    assert main(words.split()) == 0
    printed = capsys.readouterr()
    for part in (
        *(
            "story.txt",
            f"{len(story) + 1:,}",
            "all",
            "longest document:",
            "in story.txt",
            "rows.jsonl: short",
        ),
        *(" MB/s, encoded by tokenizers: learning the vocabulary ", "writing "),
        *("dropped as duplicate: 1 documents", "dropped as min_words: 1 documents"),
    ):
        assert part in printed.out + printed.err, printed.out
    assert "onward train prepared/mine" in printed.err
    assert main([*words.split(), "--json"]) == 0, "the command accepts a complete preparation"
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == sum(map(len, load_tokens(place / "prepared/mine").sources))
    assert [source["documents"] for source in found["sources"]] == [1, 1]


REFUSED = {
    "story.txt": "no folder to write to: name one with --out",
    "--out o": "no text is named",
    "gone.txt --out o": "gone.txt does not exist",
    "rows.jsonl --out o": "rows.jsonl line 1 has no text under 'text' (it has 'body'): name it with --field",
    "story.txt --out o --tokenizer nope": "tokenizer is 'nope'",
    "story.txt --out .": "exists already",
    "story.txt --out o --min-wrods 3": "did you mean --min-words",
    "story.txt --out o --min-words many": "--min-words is 'many'",
    "rows.jsonl --out o --field body --min-words 99": "all documents are dropped (3 as min_words",
    "story.txt --out o --near 3": "near is 3",
    "story.txt --out o --workers -1": "workers is -1",
    "story.txt --out story.txt": "exists already",
    "story.txt --out story.txt/o": "story.txt/o.unfinished",
}


def test_what_is_skipped_in_a_folder_is_said(place: Path, capsys) -> None:
    (place / "notes").mkdir()
    for name in "a.txt", "b.png", "c.png":
        (place / "notes" / name).write_text("some text")
    assert main(["data", "prepare", "notes", "story.txt", "--tokenizer", "byte", "--out", "notes/out"]) == 0
    assert "notes: skipped .png: 2, such as notes/b.png\n" in capsys.readouterr().err
    assert skipped_in("notes/out", Path("run")) == "", "prepared tokens are read"


def test_a_corpus_is_named_as_json(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(corpora, "get", lambda name, progress: Path(f"{name}.txt"))
    assert main(["data", "get", "tinyshakespeare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "tinyshakespeare", "path": "tinyshakespeare.txt"}


def test_pipe_is_announced_before_it_is_waited_for(place: Path, capsys) -> None:
    os.mkfifo("pipe")
    threading.Thread(target=Path("pipe").write_text, args=["some text"], daemon=True).start()
    assert main(["data", "prepare", "pipe", "--tokenizer", "byte", "--out", "out"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("reading the pipe pipe until it is closed\n")
    assert "longest document: 10 tokens, in pipe\n" in printed.out


@pytest.mark.parametrize("words", REFUSED)
def test_user_errors_are_one_sentence_and_leave_no_files(words: str, place: Path, capsys) -> None:
    before = sorted(place.rglob("*"))
    assert main(["data", "prepare", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert REFUSED[words] in printed.err
    assert printed.err.count("\n") == 1
    assert sorted(place.rglob("*")) == before
