"""The card of a model contains only recorded facts, and a push uploads only the model and its card."""

import json
import re
import shlex
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import onward
from onward import RunConfig
from onward.base import fields
from onward.cli import main
from onward.cli.commands.train import configure

from support.decoders import DECODERS, decoder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that is not a run."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    onward.save(onward.LanguageModel(decoder(DECODERS["llama"]), onward.train_tokenizer("byte", [])), folder)
    return folder


def card_of(folder: Path, tmp_path: Path, *words: str) -> str:
    out = tmp_path / "card.md"
    assert main(["card", str(folder), "--license", "mit", "--out", str(out), *words]) == 0
    return out.read_text()


def test_the_card_of_a_run_has_its_command_data_curves_and_evaluation(tiny_run: Path, tmp_path: Path) -> None:
    card = card_of(tiny_run, tmp_path, "--name", "me/tiny")
    head = ModelCard(card).data.to_dict()
    assert (head["license"], head["library_name"], head["pipeline_tag"]) == ("mit", "transformers", "text-generation")
    result = json.loads((tiny_run / "result.json").read_text())
    sections = re.findall("^#+ (.*)", card, re.MULTILINE)
    assert sections[:7] == ["tiny", "The model", "How to use it", "How it was trained", "Data", "Curves", "Evaluation"]
    assert sections[-2:] == ["Published figures", "Limitations"]
    said = "![losses by step](loss.svg)", "| story.txt |", f"| perplexity | {result['perplexity']:.6g} |", "| 60 |"
    for text in (*said, 'onward.load("me/tiny")', 'from_pretrained("me/tiny")', "llama-cli -m tiny.gguf"):
        assert text in card
    assert str(tiny_run.parent) not in card
    trained = json.loads((tiny_run / "run.json").read_text())
    [words] = [shlex.split(line) for line in card.splitlines() if line.startswith("onward train ")]
    config = fields.plain(configure(words[2:])[0])
    models = [RunConfig(preset=one["preset"], model=one["model"]).decoder(300) for one in (config, trained)]
    assert models[0] == models[1]
    assert {name for name in trained if config[name] != trained[name]} <= {"sources", "out", "model"}


def test_the_card_of_a_model_that_is_no_run_has_no_training(model: Path, tmp_path: Path) -> None:
    card = card_of(model, tmp_path)
    assert "How to use it" in card
    assert not {"How it was trained", "Evaluation", "trained for"} & {*re.findall("[A-Z][a-z ]+", card)}


def test_the_next_command_of_a_card_can_be_run(model: Path, tmp_path: Path, capsys) -> None:
    assert main(["card", str(model), "--license", "mit", "--out", str(tmp_path / "card.md")]) == 0
    words = shlex.split(capsys.readouterr().err.partition("onward push ")[2])
    assert main(["push", *words]) == 0
    assert "would go to me/llama" in capsys.readouterr().out


def test_a_push_would_upload_the_model_and_its_card_alone(tiny_run: Path, capsys) -> None:
    assert main(["push", str(tiny_run), "me/tiny", "--license", "mit", "--dry-run", "--json"]) == 0
    files = {row["file"]: row["bytes"] for row in json.loads(capsys.readouterr().out)["files"]}
    kept = "README.md", "config.json", "loss.svg", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    assert {*files} == {*kept}
    assert files["model.safetensors"] == (tiny_run / "model.safetensors").stat().st_size
    assert not (tiny_run / "README.md").exists()


REFUSED = {
    "push MODEL me/x --dry-run": "the model needs a license: give --license apache-2.0",
    "card MODEL --license 'My Own'": "--license is 'My Own'",
    "push MODEL x --license mit": "x is not of the form OWNER/MODEL",
    "push MODEL a/b/c --license mit": "a/b/c is not of the form OWNER/MODEL",
    "push gone me/x --license mit": "there is no folder gone",
    "card MODEL --license mit --out written.md": "written.md exists already",
    "push written me/x --license mit": "name the license there",
    "push ADAPTER me/x --license mit": "which is an adapter: merge it into its base",
    "push BROKEN me/x --license mit": "is cut off or not a safetensors file",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_published_is_refused_in_a_sentence(
    words: str, model: Path, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in "written", "ADAPTER", "BROKEN":
        Path(name).mkdir()
    Path("written.md").touch()
    Path("written/README.md").touch()
    Path("ADAPTER/adapter_config.json").write_text("{}")
    Path("BROKEN/config.json").write_text((model / "config.json").read_text())
    Path("BROKEN/model.safetensors").write_bytes(b"cut")
    assert main(shlex.split(words.replace("MODEL", str(model)))) == 2
    error = capsys.readouterr().err
    assert REFUSED[words] in error
    assert error.count("\n") == 1
