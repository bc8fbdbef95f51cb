"""The command `onward models`."""

import json
from pathlib import Path
from typing import Any

import pytest

from onward import DecoderConfig
from onward.base.fields import build
from onward.cli import main
from onward.cli.shared.output import human
from onward.families import modules, presets


def models(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["models", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def as_json(*words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["models", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_families_and_releases_are_listed(capsys) -> None:
    said = models(capsys=capsys)
    assert "mistral-7b 7.24 B parameters 32,768 tokens of context from llama-2-7b" in said
    assert all(f" {name} " in said for name in presets())
    found = as_json(capsys=capsys)
    assert {family["family"] for family in found} == {*modules()}
    [gpt2] = [preset for family in found for preset in family["presets"] if preset["name"] == "gpt2"]
    assert gpt2 == {
        "name": "gpt2",
        "parameters": 124_439_808,
        "active_parameters": 124_439_808,
        "context_length": 1024,
        "ancestor": "gpt",
    }


@pytest.mark.parametrize(
    ("words", "release"),
    [("llama-3.1", "llama-3.1-8b"), ("Llama 3.1", "llama-3.1-8b"), ("GPT-2", "gpt2"), ("Qwen3 8B", "qwen3-8b")],
)
def test_names_are_found_as_people_write_them(words: str, release: str, capsys) -> None:
    found = as_json(words, capsys=capsys)
    assert release in [preset["name"] for family in found for preset in family["presets"]]


def test_one_release_is_shown_with_the_steps_of_its_lineage(capsys) -> None:
    said = models("llama-3.1-8b", capsys=capsys)
    assert "parameters 8,030,261,248" in said
    steps = ["llama-3-8b -> llama-3.1-8b what before after", "llama-2-7b -> llama-3-8b", "gpt -> gpt2"]
    assert sorted(steps, key=said.index) == steps
    found = as_json("llama-3.1-8b", capsys=capsys)
    assert build(DecoderConfig, found["decoder"]) == presets()["llama-3.1-8b"].config
    facts = {fact["what"]: fact["value"] for fact in found["facts"]}
    assert facts["parameters"] == 8_030_261_248
    assert facts["key/value bytes per token"] == 131_072
    assert found["steps"][0]["before"] == "llama-3-8b"


def test_two_releases_are_compared(capsys) -> None:
    said = models("diff", "gpt2", "llama-2-7b", capsys=capsys)
    assert said.startswith("gpt2 -> llama-2-7b what before after parameters 124,439,808 6,738,415,616")
    assert "biases q, k, v, out, mlp, norms none" in said
    found = as_json("diff", "gpt2", "llama-2-7b", capsys=capsys)
    assert (found["before"], found["after"]) == ("gpt2", "llama-2-7b")
    changes = {change.pop("what"): change for change in found["changes"]}
    assert changes["position.theta"] == {
        "before": None,
        "after": 10_000.0,
        "meaning": "base of the frequencies; the larger, the slower the rotation",
    }
    assert changes["tied"]["before"] is True


def test_equal_releases_print_nothing_changed(capsys) -> None:
    assert models("diff", "llama-2-7b", "llama-2-7b", capsys=capsys) == "llama-2-7b -> llama-2-7b nothing"


def test_a_wide_terminal_shows_what_the_rows_mean(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    meaning = "number of blocks"
    assert meaning not in models("diff", "gpt2", "llama-2-7b", capsys=capsys)
    monkeypatch.setenv("COLUMNS", "160")
    assert meaning in models("diff", "gpt2", "llama-2-7b", capsys=capsys)


def test_folders_are_accepted_like_releases(tiny_run: Path, capsys) -> None:
    assert "d_model 32 width of the residual stream" in models(str(tiny_run), capsys=capsys)
    found = as_json("diff", "llama-2-7b", str(tiny_run), capsys=capsys)
    assert {"what": "n_layers", "before": 32, "after": 2, "meaning": "number of blocks"} in found["changes"]
    assert as_json(str(tiny_run), capsys=capsys)["steps"] == []


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (7_241_732_096, "7.24 B"),
        (124_439_808, "124 M"),
        (999_885_952, "1.00 B"),
        (14_067_712, "14.1 M"),
        (260_032, "260 K"),
        (1_000_000_000_000, "1.00 T"),
    ],
)
def test_numbers_have_three_digits(number: int, expected: str) -> None:
    assert human(number) == expected
