"""Interactive figures: moved from the keyboard in a browser, they show the numbers that Python computes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Sampling, next_token_distribution
from onward.inspection.inputs import logits
from onward.learn.cells import cells
from onward.learn.chapters import chapters
from onward.learn.interactive.figure import InteractiveFigure, read_figure
from onward.learn.interactive.samplers import samplers

NO_HEADING = {"page-has-heading-one": {"enabled": False}}  # the chapter around a figure has one
LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def writer() -> onward.LanguageModel:
    """A model of letters whose logits differ a lot."""
    tokenizer = onward.train_tokenizer("char", [LETTERS])
    torch.manual_seed(0)
    model = onward.Decoder(onward.DecoderConfig(tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2)).eval()
    model.embed.weight.data *= 30
    return onward.LanguageModel(model, tokenizer)


@contextmanager
def opened(browser: Any, figure: InteractiveFigure, scheme: str = "light", width: int = 1280) -> Iterator[Any]:
    """Show a figure; afterwards there is no error, and the figure fits the window."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True)
    page = context.new_page()
    page.set_default_timeout(10_000)
    faults: list[str] = []
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.set_content(figure.page())
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not faults
    context.close()


def press(page: Any, label: str, *keys: str) -> None:
    """Press keys on the control with this label."""
    for key in keys:
        page.get_by_label(label, exact=True).press(key)


def columns(page: Any) -> list[list[str]]:
    """The texts of the rows of a table of bars: the name, and the columns beside the bar."""
    rows = [row.locator("th, td:not(.bar)").all_text_contents() for row in page.locator("tbody tr").all()]
    return [[text.replace("\u00a0", " ").strip() for text in row] for row in rows]


def share(p: float) -> str:
    return f"{100 * p:.1f} %" if p >= 0.001 else "< 0.1 %" if p else "cut"


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"temperature": ["ArrowLeft"] * 8}, {"temperature": 0.6}),
        ({"temperature": ["Home"]}, {"temperature": 0}),
        ({"top-k": ["ArrowRight"] * 5, "temperature": ["End"]}, {"temperature": 2, "top_k": 5}),
        ({"top-p": ["ArrowLeft"] * 20}, {"temperature": 1, "top_p": 0.8}),
        ({"min-p": ["ArrowRight"] * 10, "temperature": ["End"]}, {"temperature": 2, "min_p": 0.1}),
    ],
)
def test_sliders_show_the_distribution_of_the_sampler(keys: Any, options: Any, browser: Any) -> None:
    lm = writer()
    with opened(browser, samplers(lm, ["the c", "a"])) as page:
        page.get_by_label("Text").select_option("1")
        for label, pressed in keys.items():
            press(page, label, *pressed)
        z = logits(lm.model, lm.tokenizer.begin(lm.tokenizer.encode("a")))[-1]
        p = next_token_distribution(z[None], Sampling(**options))[0][z.argsort(descending=True)]
        shown = [*p[:12].tolist(), float(p[12:].sum())]
        assert [row[1] for row in columns(page)] == [share(one) for one in shown]
        assert page.get_by_role("status").text_content().startswith(f"{int((p > 0).sum())} token")
        page.get_by_role("button", name="Draw").click()
        drawn = [int(row[2] or 0) for row in columns(page)]
        assert sum(drawn) == 100
        assert not any(count for count, one in zip(drawn, shown) if not one)


FIGURES = [chapter.path.parent / cell.figure for chapter in chapters() for cell in cells(chapter.text) if cell.figure]


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_figures_of_the_chapters_are_accessible_and_fit(path: Path, browser: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe").Axe()
    for scheme, width in ("light", 1280), ("dark", 390):
        with opened(browser, read_figure(path), scheme, width) as page:
            page.locator("figure.interactive .body > *").first.wait_for()
            violations = axe.run(page, options={"rules": NO_HEADING}).response["violations"]
            assert not [(rule["id"], node["html"][:200]) for rule in violations for node in rule["nodes"]]


def test_every_file_of_numbers_has_its_place_in_a_chapter() -> None:
    assert {path.name for path in chapters()[0].path.parent.glob("*.json")} == {path.name for path in FIGURES}


def test_a_figure_is_written_and_read_and_its_text_cannot_end_the_script(tmp_path: Path) -> None:
    figure = InteractiveFigure("samplers", "A title", "What to try", {"text": "</script><b>"})
    figure.write(tmp_path / "figure.json")
    assert read_figure(tmp_path / "figure.json") == figure
    assert json.loads((tmp_path / "figure.json").read_text())["data"] == {"text": "</script><b>"}
    assert "</script><b>" not in figure.page()
    assert "A title" in figure._repr_html_()
    with pytest.raises(onward.UserError, match=r"Cannot write figure.svg"):
        figure.write(Path("figure.svg"))
