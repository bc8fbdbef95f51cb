"""Displays in a notebook: tables, pictures and curves, and the progress of training as one line."""

import base64
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import onward
from onward import Experts, Notice, Run, explain
from onward.base.notebook import in_notebook
from onward.reports import IDEAS, RunRecord
from onward.training.run.progress import NotebookProgress, progress

from support.pages import HOSTILE, Page, model_and_tokenizer
from support.runs import SETTINGS


def shown(value: Any) -> str:
    """The text of an object's HTML; checks that the HTML is well-formed and does not change the page's styles."""
    parsed = Page(value._repr_html_().replace("</th>", " </th>"))
    assert parsed.open == []
    assert not any(tag in ("script", "style") for tag, _ in parsed.tags)
    return parsed.text


def picture_in(html: str) -> ElementTree.Element:
    assert "overflow-x:auto" in html
    return ElementTree.fromstring(base64.b64decode(re.search(r'base64,([^"]*)"', html)[1]))


def test_models_and_configurations_show_parts_parameters_and_memory() -> None:
    model, tokenizer = model_and_tokenizer(mlp=Experts(4))
    count = sum(p.numel() for p in model.parameters())
    lm = onward.LanguageModel(model, tokenizer)
    for value in (model.config, model, lm):
        text = shown(value)
        for said in (type(value).__name__, "2 of width 16, context 64", f"{count:,}, of which a token uses"):
            assert said in text, value
    assert f"{4 * count / 1e3:.3g} kB in fp32" in shown(model.config)
    half = sum(p.nbytes for p in model.bfloat16().parameters()) + sum(b.nbytes for b in model.buffers())
    assert f"{half / 1e3:.3g} kB in bfloat16 on cpu" in shown(model)
    assert f"tokenizer {tokenizer.vocab_size:,} tokens" in shown(lm)
    model.requires_grad_(False).norm.requires_grad_(True)
    assert "of these are trained 16" in shown(model)


def test_model_that_cannot_be_described_is_left_to_its_text() -> None:
    huge = onward.DecoderConfig(vocab_size=10**9, d_model=10**9, n_layers=1, n_heads=1)
    assert huge._repr_html_() is None


def test_pictures_and_stories_show_themselves() -> None:
    picture = IDEAS["mask"]()
    bundle = picture._repr_mimebundle_(include=None, exclude=None)
    assert {*bundle} == {"text/html", "image/svg+xml", "text/plain"}
    assert picture_in(picture._repr_html_()).get("aria-label") == "Attention masks"
    assert bundle["text/plain"].startswith("Attention masks")
    harmless = HOSTILE.replace("\ud800", "")
    story = explain(*model_and_tokenizer(harmless), f"to {harmless}")
    [(tag, attributes)] = Page(story._repr_html_()).tags
    assert tag == "iframe"
    assert Page(attributes["srcdoc"] or "").open == []


def test_runs_show_their_figures_and_their_curve(tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    record = RunRecord(folder)
    text, figures = shown(record), record.figures()
    for said in ("finished", f"{figures.step} of {figures.steps}", f"{figures.validation_loss:.4f}"):
        assert said in text
        assert said in shown(figures)
    assert picture_in(record._repr_html_()).get("aria-label") == "Loss by training step"
    (folder / "result.json").unlink()
    for save in sorted((folder / "checkpoints").glob("step-*"))[-1:]:
        save.rename(tmp_path / "gone")
    assert "stopped" in shown(Run.resume(str(folder)))


class Kernel:
    """A notebook's kernel that records the displayed lines and their updates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.displays: list[list[str]] = []
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        ipython.get_ipython = lambda: SimpleNamespace(kernel=self)  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, data: dict[str, str], raw: bool, display_id: bool) -> SimpleNamespace:
        assert (raw, display_id) == (True, True)
        lines = [data["text/plain"]]
        self.displays.append(lines)
        return SimpleNamespace(update=lambda data, raw: lines.append(data["text/plain"]))


def test_progress_in_a_notebook_is_one_line_that_changes(
    story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not in_notebook()
    kernel = Kernel(monkeypatch)
    assert in_notebook()
    onward.train(str(story_file), tmp_path / "run", **SETTINGS | {"steps": 4, "validate_every": 2})
    [lines] = kernel.displays
    assert len(lines) > 2
    assert re.fullmatch(r"step 4 of 4 \| loss [\d.]+ \| [\d,]+ tokens/s \| validation loss [\d.]+", lines[-1])
    assert capsys.readouterr().err == ""


def test_notices_in_a_notebook_are_lines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = Kernel(monkeypatch)
    made = progress(SimpleNamespace(ended=False))  # type: ignore[arg-type]
    assert isinstance(made, NotebookProgress)
    made(Notice(0, "the clock is slow"))
    assert capsys.readouterr().out == "the clock is slow\n"
    assert kernel.displays == []
