"""One distribution with each sampling strategy: its probabilities, table and picture."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import onward
from onward.reports import compare
from onward.reports.pictures.strategies import BAR, Comparison

DOCS = Path(__file__).parents[2] / "docs"
WORDS = {"mat": 0.35, "floor": 0.25, "bed": 0.15, "roof": 0.10, "chair": 0.05, "table": 0.04, "ground": 0.03}
WORDS["other"] = 0.03
NUMBER = r"-?\d*\.?\d+"


def worked() -> Comparison:
    return compare(torch.tensor([*WORDS.values()]).log(), [*WORDS].__getitem__)


def random_logits() -> Tensor:
    return torch.randn(100, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("as it is", WORDS),
        ("temperature 0", {"mat": 1}),
        ("temperature 2", {"mat": 0.231}),
        ("top_k 3", {"mat": 0.467, "floor": 0.333, "bed": 0.2, "roof": 0}),
        ("top_p 0.9", {"mat": 0.389, "chair": 0.056, "table": 0}),
        ("min_p 0.2", {"roof": 0.118, "chair": 0}),
        ("typical_p 0.5", {"mat": 0, "floor": 0.5, "bed": 0.3, "roof": 0.2, "chair": 0}),
        ("no_repeat_ngram_size 2", {"bed": 0, "mat": 0.35 / 0.85}),
        ("suppress_tokens mat", {"mat": 0, "floor": 0.25 / 0.65}),
        ("forced_tokens bed", {"bed": 1, "mat": 0}),
    ],
)
def test_strategies_change_the_worked_example_as_defined(strategy: str, expected: dict[str, float]) -> None:
    found = worked()
    shares = dict(zip(found.tokens, found.probabilities[strategy]))
    assert {name: shares[name] for name in expected} == pytest.approx(expected, abs=5e-4)


def test_penalties_and_biases_change_the_log_odds_by_their_formulas() -> None:
    found, odds = worked().probabilities, {}
    for strategy, shares in found.items():
        if min(shares) > 0:
            odds[strategy] = torch.tensor(shares).log() - torch.tensor(found["as it is"]).log()
            odds[strategy] = odds[strategy] - odds[strategy][-1]  # no option changes the logit of the last token
    logits = torch.tensor(found["as it is"]).log()
    assert odds["frequency_penalty 1"].tolist()[:4] == pytest.approx([0, -2, -1, 0], abs=1e-5)
    assert odds["presence_penalty 1"].tolist()[:4] == pytest.approx([0, -1, -1, 0], abs=1e-5)
    assert odds["logit_bias roof: 2"].tolist()[:5] == pytest.approx([0, 0, 0, 2, 0], abs=1e-5)
    assert odds["repetition_penalty 1.5"][1:3].tolist() == pytest.approx((0.5 * logits[1:3]).tolist(), abs=1e-5)


def test_probabilities_of_each_strategy_sum_to_one_with_the_others() -> None:
    found = compare(random_logits(), str, most=6)
    assert found.tokens[-1] == "others"
    assert len(found.tokens) == 7
    for shares in found.probabilities.values():
        assert sum(shares) == pytest.approx(1, abs=1e-5)


def test_table_in_the_docs_is_what_the_code_computes() -> None:
    page = (DOCS / "generation.md").read_text(encoding="utf-8")
    assert worked().markdown() in page, f"put this into docs/generation.md:\n{worked().markdown()}"


def test_bars_of_the_picture_are_as_long_as_the_probabilities() -> None:
    found = compare(random_logits(), str)
    root = ElementTree.fromstring(found.svg())
    panels = root.findall("{*}g[@class='panel']")
    assert len(panels) == len(found.probabilities)
    for panel, (name, shares) in zip(panels, found.probabilities.items()):
        title, *texts = panel.findall("{*}text")
        assert title.text == name
        for kind, wanted in ("before", found.probabilities["as it is"]), ("after", shares):
            drawn = panel.find(f"{{*}}path[@class='{kind}']").get("d")
            lengths = [float(n) for n in re.findall(rf"h({NUMBER})", drawn)]
            assert lengths == pytest.approx([p * BAR for p in wanted if p], abs=0.051)
        assert [text.text for text in texts[::2]] == found.tokens


def test_table_and_picture_escape_any_token() -> None:
    names = ["<b>&", "a|b", " the", "\n", "\x00", "internationalisation", '"', "é"]
    found = compare(random_logits()[:8], names.__getitem__)
    labels = [text.text for text in ElementTree.fromstring(found.svg()).iterfind(".//{*}text[@text-anchor]")]
    assert {"<b>&", "a|b", "·the", "↵", r"\x00", "interna…", '"', "é"} <= set(labels)
    assert {line.replace(r"\|", "").count("|") for line in found.markdown().splitlines()} == {
        len(found.probabilities) + 2
    }


def test_picture_in_the_docs_is_that_of_stories_260k(shared: Path) -> None:
    lm = onward.load(shared / "stories260K")
    with torch.inference_mode():
        logits = lm.model(torch.tensor([lm.tokenizer.encode("The cat sat on the")]))[0, -1]
    made, kept = compare(logits, lm.tokenizer.piece).svg(), (DOCS / "strategies.svg").read_text(encoding="utf-8")
    assert re.split(NUMBER, made) == re.split(NUMBER, kept), "draw docs/strategies.svg again, as the page says"
    numbers = [[float(n) for n in re.findall(NUMBER, svg)] for svg in (made, kept)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.11)  # rounding may differ on another machine
    assert "prefers-color-scheme: dark" in kept
