"""The loss of models on the answers of chats equals that of fine-tuning's validation; answers are shown side by
side."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onward
from onward.cli import main
from onward.evaluation.chats import AnswerLosses
from onward.evaluation.preferences import Pair, preferred, win_rate
from onward.reports.sides import sides_page

from support.browser import chromium
from support.judge import judge_server

WORDS = {"cat": "an animal", "oak": "a tall old tree", "rose": "a red flower", "owl": "a bird"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, an adapter trained to answer, and the chats."""
    folder = tmp_path_factory.mktemp("chats")
    talks = [[("user", f"{word}?"), ("assistant", f"It is {answer}.")] for word, answer in WORDS.items()]
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = onward.train_tokenizer("byte", [])
    config = onward.DecoderConfig(tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, context_length=64)
    onward.save(onward.LanguageModel(onward.Decoder(config), tokenizer), folder / "base")
    options: dict[str, Any] = {"validation": str(folder / "chats.jsonl"), "template": "plain", "lora": 4, "steps": 4}
    onward.finetune(folder / "base", folder / "chats.jsonl", folder / "lora", precision="fp32", device="cpu", **options)
    return folder


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_loss_on_answers_is_that_of_validation_and_models_are_compared(folder: Path, capsys) -> None:
    assert main(["merge", str(folder / "lora"), str(folder / "merged")]) == 0
    capsys.readouterr()
    names = [str(folder / name) for name in ("base", "lora", "merged")]
    found = evaluated(capsys, *names, folder / "chats.jsonl")
    base, lora, merged = found["results"]
    assert lora["loss"] == pytest.approx(json.loads((folder / "lora/result.json").read_text())["loss"], abs=1e-5)
    assert merged["loss"] == pytest.approx(lora["loss"], abs=1e-5)
    assert base["examples"] == 4
    # plus the leading space and the end token
    assert base["tokens"] == sum(len(f"It is {answer}.") + 2 for answer in WORDS.values())
    assert found["differences"][0]["difference"] == pytest.approx(lora["loss"] - base["loss"], abs=1e-6)
    assert 0 < found["differences"][0]["standard_error"] < base["standard_error"] + lora["standard_error"]


def test_standard_error_is_that_of_the_bootstrap_over_examples() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(5, 50, 400)
    totals = counts * rng.normal(2.0, 0.5, 400)
    drawn = rng.integers(0, 400, (3000, 400))
    wanted = (totals[drawn].sum(1) / counts[drawn].sum(1)).std()
    assert AnswerLosses(totals, counts).evaluation.standard_error == pytest.approx(wanted, rel=0.05)


def test_rows_of_texts_are_documents_and_several_models_read_them(folder: Path, capsys) -> None:
    (folder / "texts.jsonl").write_text('{"text": "It is a bird. It is a tree."}\n')
    found = evaluated(capsys, folder / "base", folder / "lora", folder / "texts.jsonl")
    assert [row["bytes"] for row in found["results"]] == [27, 27]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("base chats.jsonl --stride 3", "stride applies to texts, but the rows are examples with answers"),
        ("base texts.txt --template plain", "template applies only to examples"),
        ("base chats.jsonl --template chatml", "whose control tokens"),
        ("base lora", "Cannot compare base and lora without a text"),
        ("base --answers chats.jsonl --page a.html", "page needs two models, the prompts, and one process"),
        ("base lora --answers wrong.jsonl --page a.html", 'has no prompt (it has ["text"])'),
    ],
)
def test_mistakes_are_named(folder: Path, words: str, message: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "texts.txt").write_text("some text")
    (folder / "wrong.jsonl").write_text('{"text": "a"}\n')
    assert main(["evaluate", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_page_has_the_answers_of_both_models(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "prompts.txt").write_text("cat?\n\nowl?\n")
    found = evaluated(capsys, "base", "lora", "--answers", "prompts.txt", "--page", "a.html", "--no-keep")
    assert [row["prompt"] for row in found["rows"]] == ["cat?", "owl?"]
    page = (folder / "a.html").read_text()
    assert all(json.dumps(row["answers"]).replace("<", "\\u003c")[1:9] in page for row in found["rows"])


def test_judge_is_asked_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(text: str) -> str:
        return "A" if text.index("good") < text.index("Answer B") else "B"

    pairs = [Pair("p", "bad", "good"), Pair("p", "good", "bad"), Pair("p", "good", "good")]
    with judge_server(monkeypatch) as server:
        server.replies = [(200, reply)]
        verdicts = preferred(pairs, f"http://127.0.0.1:{server.server_port}/v1", "m")
        server.replies = [(200, "A")]  # the judge always prefers the first answer, which counts as a tie
        assert preferred(pairs[:1], f"http://127.0.0.1:{server.server_port}/v1", "m") == [0.5]
    assert verdicts == [1.0, 0.0, 0.5]
    assert win_rate(verdicts) == {"win_rate": 0.5, "standard_error": pytest.approx(0.5 / math.sqrt(3)), "ties": 1.0}


def test_page_is_judged_with_keys(tmp_path: Path) -> None:
    pairs = [Pair(f"</script>prompt {i}", f"one {i}", f"two {i}") for i in range(3)]
    (tmp_path / "a.html").write_text(sides_page(["A", "B"], pairs, [1.0, 0.0, 0.5]), encoding="utf-8")
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        page.goto(f"file://{tmp_path / 'a.html'}")
        for i in range(3):
            assert page.inner_text("#prompt") == f"</script>prompt {i}"
            left = page.inner_text("#left")
            assert "A" not in left
            page.keyboard.press("1" if f"two {i}" in left else "2")
        page.keyboard.press("0")
        assert page.inner_text("#score").startswith("B is preferred to A in 83 % of 3, ties as a half")
        assert page.inner_text("#judge") == "The judge prefers a tie."
        page.reload()
        assert page.inner_text("#count") == "1 of 3, 3 judged"
        assert page.evaluate("document.documentElement.scrollWidth") == 390
