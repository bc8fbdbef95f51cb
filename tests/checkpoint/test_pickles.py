"""Pickles are read only on request, only as weights, and other code in them never runs."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import onward
from onward.checkpoint.pickles import main as read
from onward.checkpoint.weights import read_tensors
from onward.cli import main

from support.decoders import DECODERS, decoder


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def pickled(state: object, path: Path, **options: bool) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path, **options)


@pytest.mark.parametrize("old", [False, pytest.param(True, marks=pytest.mark.long)], ids=["zip", "before zip"])
def test_a_model_in_pickles_becomes_a_folder_with_safetensors(old: bool, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    lm = onward.LanguageModel(decoder(DECODERS["llama"]), onward.train_tokenizer("byte", []))
    onward.save(lm, "old", shard_bytes=9000)
    parts = sorted(Path("old").glob("model-*.safetensors"))
    for number, part in enumerate(parts, 1):
        state = read_tensors(part)
        pickled(
            state, Path(f"old/pytorch_model-{number:05}-of-{len(parts):05}.bin"), _use_new_zipfile_serialization=not old
        )
        part.unlink()
    Path("old/model.safetensors.index.json").unlink()
    assert main(["evaluate", "old", "x.txt"]) == 2
    assert "with onward convert old OUT --from-bin" in capsys.readouterr().err
    assert main(["convert", "old", "new", "--from-bin"]) == 0
    new = onward.load("new")
    assert new.model.config == lm.model.config
    assert all(torch.equal(a, b) for a, b in zip(new.model.parameters(), lm.model.parameters(), strict=True))
    assert new.tokenizer.encode("Once") == lm.tokenizer.encode("Once")
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new"}


HOSTILE = {
    "code": {"a": Bomb()},
    "no tensors": {"a": 1},
    "a list": [1, 2],
    "a number": OrderedDict(a=torch.zeros(3, dtype=torch.complex64)),
    "far more numbers than bytes": {"a": torch.zeros(1).expand(1 << 40)},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_table_of_weights_is_refused_and_never_run(case: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    # do not limit the memory of the test process
    monkeypatch.setattr("onward.checkpoint.pickles.limit_memory", lambda more: None)
    pickled(HOSTILE[case], tmp_path / "pytorch_model.bin")
    assert read([str(tmp_path), str(tmp_path / "pytorch_model.bin")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert len(error) > 20
    assert not Path("ran").exists()


def test_a_refusal_leaves_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    pickled({"a": Bomb()}, Path("old/pytorch_model.bin"))
    assert main(["convert", "old", "new", "--from-bin"]) == 2
    error = capsys.readouterr().err
    assert "old: the pickles cannot be read as weights (one contains getattr besides weights)" in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    onward.save(onward.LanguageModel(decoder(DECODERS["llama"])), "plain")
    assert main(["convert", "plain", "new", "--from-bin"]) == 2
    assert "plain has no pytorch_model.bin" in capsys.readouterr().err
