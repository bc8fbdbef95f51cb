"""onward quantize: a folder whose model is bit-for-bit that of --quantize, the error of each layer, and mistakes in one
sentence."""

import json
from pathlib import Path

import pytest
import torch

import onward
from onward.cli import main
from onward.transforms.quantize import layer_errors


def test_a_quantized_folder_is_the_model_that_quantize_loads(tiny_run: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "int8"
    assert main(["quantize", str(tiny_run), str(out), "--errors", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] < found["bytes_before"] == sum(p.nbytes for p in onward.load(tiny_run).model.parameters())
    assert found["layers"] == len(found["errors"])
    errors = [error["relative_error"] for error in found["errors"]]
    assert errors == sorted(errors, reverse=True)
    assert 0 < errors[-1] < errors[0] < 0.02
    wanted, loaded = (onward.load(tiny_run, quantize="int8"), onward.load(out))
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model(tokens), wanted.model(tokens))
    assert loaded.generate("the", 8, seed=0) == wanted.generate("the", 8, seed=0)


def test_a_layer_error_is_the_norm_of_the_difference(tiny_run: Path) -> None:
    plain, quantized = onward.load(tiny_run).model, onward.load(tiny_run, quantize="int4").model
    for error in layer_errors(plain, quantized):
        exact, rounded = (model.get_submodule(error.layer).weight for model in (plain, quantized))
        assert error.relative_error == pytest.approx(((rounded - exact).norm() / exact.norm()).item(), rel=1e-5)


def test_evaluate_shows_plain_and_quantized_beside_each_other(tiny_run: Path, story_file: Path, capsys) -> None:
    words = ["evaluate", str(tiny_run), str(story_file)]
    assert main([*words, "--quantize", "int4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main([*words, "--json"]) == 0
    assert found.pop("plain") == json.loads(capsys.readouterr().out)
    assert main([*words, "--quantize", "int4"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:3]] == ["weights", "plain", "int4"]


REFUSED = {
    "RUN there --to int3": "--to is 'int3': did you mean int8?",
    "nowhere there": "there is no folder nowhere",
    "RUN RUN": "exists: choose another folder",
    "RUN/config.json there": "is a file",
    "INT8 there": "quantized already",
    "INT8 there --to int4": "quantized already",
    "NARROW there --to int4": "no linear layer",
}


def test_mistakes_are_one_sentence_and_write_nothing(tiny_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    narrow = onward.Decoder(onward.DecoderConfig(vocab_size=40, d_model=24, n_layers=1, n_heads=2, d_ff=40))
    onward.save(onward.LanguageModel(narrow), "narrow")
    onward.save(onward.load(tiny_run, quantize="int8"), "int8")
    places = {"RUN": str(tiny_run), "INT8": "int8", "NARROW": "narrow"}
    for words, sentence in REFUSED.items():
        for name, place in places.items():
            words = words.replace(name, place)
        assert main(["quantize", *words.split()]) == 2
        message = capsys.readouterr().err
        assert sentence in message
        assert {path.name for path in tmp_path.iterdir()} == {"narrow", "int8"}
