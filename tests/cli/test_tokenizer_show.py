"""onward tokenizer show: the pieces of a text under several tokenizers."""

import io
import json
from pathlib import Path

import pytest

import onward
from onward.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers in a folder and in a GGUF file."""
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizer = onward.train_tokenizer("byte", [])
    tokenizer.save(folder / "byte")
    model = onward.Decoder(onward.DecoderConfig(tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2))
    onward.save(onward.LanguageModel(model, tokenizer), folder / "byte.gguf")
    return folder


def test_pieces_ids_and_bytes_are_shown_for_each(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    assert main(["tokenizer", "show", "byte", "byte.gguf", "a \u00e9\n", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "a \u00e9\n"
    for name, one in zip(("byte", "byte.gguf"), found["tokenizers"], strict=True):
        assert one["name"] == name
        assert [token["bytes"] for token in one["tokens"]] == ["61", "20", "c3", "a9", "0a"]
        assert [token["piece"] for token in one["tokens"]] == ["a", " ", "\ufffd", "\ufffd", "\n"]


def test_a_line_shows_white_space_and_a_table_ids(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("a b\n"))
    assert main(["tokenizer", "show", "byte", "-", "--ids"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "byte: 4 tokens, 1.00 bytes per token"
    assert lines[1] == "a|\u00b7|b|\u23ce|"
    assert lines[2].split() == ["id", "piece", "bytes"]
    assert len(lines) == 7


def test_a_new_tokenizer_is_trained_on_the_text(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tokenizer", "show", "byte", "char", "bpe:260", "abab abab", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tokenizers"]
    assert [len(one["tokens"]) for one in found] == [9, 9, 2]
    assert all("".join(token["piece"] for token in one["tokens"]) == "abab abab" for one in found)


BAD = {
    "show": "takes models and a text",
    "show text": "takes models and a text",
    "show nowhere text": "there is no folder nowhere",
    "show empty text": "there is no tokenizer in empty",
}


@pytest.mark.parametrize("words", BAD)
def test_show_refuses_in_a_sentence(words: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert main(["tokenizer", *words.split()]) == 2
    assert BAD[words] in capsys.readouterr().err
