"""The command `onward tokenizer`."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from onward import Tokenizer, train_tokenizer
from onward.cli import main


@pytest.fixture
def learned(story: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of 280 ids."""
    folder = tmp_path_factory.mktemp("learned")
    train_tokenizer("bpe:280", [story]).save(folder)
    return folder


def as_json(*words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["tokenizer", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "spec"), [([], "bpe:4096"), (["--vocab-size", "300"], "bpe:300"), (["--kind", "char"], "char")], ids=str
)
def test_train_writes_the_tokenizer_of_train_tokenizer(options, spec, story, story_file, tmp_path, capsys) -> None:
    out = tmp_path / "made" / "here"
    found = as_json("train", str(story_file), "--out", str(out), *options, capsys=capsys)
    assert found == {"folder": str(out), "vocabulary": Tokenizer.load(out).vocab_size}
    assert Tokenizer.load(out).inner.to_str() == train_tokenizer(spec, [story]).inner.to_str()


def test_train_prints_the_size_and_the_next_commands(story_file: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "my tokenizer"
    assert main(["tokenizer", "train", str(story_file), "--vocab-size", "280", "--out", str(out)]) == 0
    output = capsys.readouterr()
    assert output.out == f"{out}: 280 ids\n"
    assert f"onward train {story_file} --tokenizer '{out}'" in output.err


def test_compare_without_data_uses_the_built_in_texts(learned: Path, capsys) -> None:
    found = as_json("compare", str(learned), "byte", "char", capsys=capsys)
    assert [one["name"] for one in found["tokenizers"]] == [str(learned), "byte", "char"]
    assert [one["round_trip_failures"] for one in found["tokenizers"]] == [0, 0, 0]
    assert {"by": "language", "text": "Thai"}.items() <= found["texts"][-4].items()
    assert all(row["bytes_per_token"]["byte"] == 1 for row in found["texts"])


def test_compare_on_data_reports_by_source_script_and_kind(story_file: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "talks.jsonl"
    lines = ["def main():\n    return call(1)\n" * 300, "Старый паром выходит из порта."]
    other.write_text("".join(json.dumps({"body": line}) + "\n" for line in lines))
    words = ["compare", "byte", "bpe:300", "--data", str(other), "--field", "body"]
    found = as_json(*words, capsys=capsys)
    sizes = {(row["by"], row["text"]): row["bytes"] for row in found["texts"]}
    code, russian = (len(line.encode()) for line in lines)
    assert sizes == {
        ("all", "all"): code + russian,
        ("kind", "code"): code,
        ("kind", "prose"): russian,
        ("script", "Latin"): code,
        ("script", "Cyrillic"): russian,
        ("source", str(other)): code + russian,
    }
    assert as_json("compare", "byte", "--data", str(story_file), capsys=capsys)["texts"][-1]["text"] == str(story_file)


def test_comparison_has_letters_and_shows_a_text_that_is_not_decoded(story_file, tmp_path, capsys) -> None:
    as_json("train", str(story_file), "--kind", "char", "--out", str(tmp_path / "chars"), capsys=capsys)
    assert main(["tokenizer", "compare", "byte", str(tmp_path / "chars")]) == 0
    output = capsys.readouterr()
    assert "by text bytes A B" in " ".join(output.out.split())
    assert "A byte 257 1.0000 0" in " ".join(output.out.split())
    assert f"{tmp_path / 'chars'} encodes 'The old ferry leaves the harbo' and decodes 'The old fe\ufffd" in output.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "TEXT"], "no folder to write to: name one with --out"),
        (["train", "--out", "OUT"], "no text is named"),
        (["train", "TEXT", "--out", "OUT", "--vocab-size", "256"], "above 256"),
        (["train", "no-such-file", "--out", "OUT"], "no-such-file does not exist"),
        (["train", "TEXT", "--out", "MADE"], "exists already"),
        (["train", "TEXT", "--out", "OUT", "--kind", "word"], "kind is 'word'"),
        (["compare"], "no tokenizer is named"),
        (["compare", "words"], "tokenizer is 'words'"),
        (["compare", "byte", "--data", "no-such-file"], "no-such-file does not exist"),
        (["learn"], "action is 'learn'"),
    ],
    ids=str,
)
def test_user_errors_are_one_sentence_and_write_no_files(words, message, story_file, learned, tmp_path, capsys) -> None:
    places = {"TEXT": str(story_file), "OUT": str(tmp_path / "out"), "MADE": str(learned)}
    assert main(["tokenizer", *(places.get(word, word) for word in words)]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not output.out
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("delay", [0.3, 1.5])
def test_ctrl_c_stops_training(delay: float, tmp_path: Path) -> None:
    """Also while the library computes merges, which takes much longer than reading 400,000 words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(5, 15))) for _ in range(400_000)]
    (tmp_path / "words.txt").write_text("\n".join(words))
    program = "import sys; from onward.cli import main; print(flush=True); sys.exit(main(sys.argv[1:]))"
    command = [
        "tokenizer",
        "train",
        str(tmp_path / "words.txt"),
        "--vocab-size",
        "60000",
        "--out",
        str(tmp_path / "out"),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", program, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        time.sleep(delay)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, output = process.communicate()
    assert process.returncode == 130
    assert output == "\nonward: interrupted\n"
    assert not (tmp_path / "out").exists()
