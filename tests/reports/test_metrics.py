"""Curves: the points that are drawn, and smoothing."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from onward.reports import curves
from onward.reports.pictures.plot import clock, log_ticks, short, ticks
from onward.reports.runs.charts import charts, recorded
from onward.reports.runs.curve import write_loss_svg
from onward.reports.runs.metrics import Metrics, sample, smoothed
from onward.reports.runs.report import sample_article

from support.pages import write_run


def test_loss_svg_is_a_picture_with_a_background_in_light_and_dark(tmp_path: Path) -> None:
    path = write_loss_svg(write_run(tmp_path / "run"), 29)
    assert path is not None
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    paper = root.find("{*}rect")
    assert paper is not None
    assert [f"0 0 {paper.get('width')} {paper.get('height')}", paper.get("class")] == [root.get("viewBox"), "paper"]
    style = root.findtext("{*}style") or ""
    assert "prefers-color-scheme: dark" in style
    assert ".paper { fill: var(--paper) }" in style
    dots = [line.get("d", "") for line in root.findall("{*}path") if line.get("class") == "dots"]
    assert [d.count("M") for d in dots] == [4]
    assert "ln 29 = 3.37" in "".join(root.itertext())


def test_single_steps_are_named_where_the_curve_is_smoothed(tmp_path: Path) -> None:
    short, long = (write_loss_svg(write_run(tmp_path / f"{steps}", steps), 29) for steps in (40, 400))
    assert short is not None
    assert long is not None
    assert "single steps" not in short.read_text("utf-8")
    assert "single steps" in long.read_text("utf-8")


def test_sampled_curve_keeps_its_ends_and_its_beginning() -> None:
    indices = sample(100_000, 600)
    assert indices[0] == 0
    assert indices[-1] == 99_999
    assert indices[:5] == [0, 1, 2, 3, 4]
    assert len(indices) <= 600


def test_smoothing_keeps_a_straight_line_and_the_mean_of_noise() -> None:
    line = [3 - i / 1000 for i in range(1000)]
    np.testing.assert_allclose(smoothed(line)[:980], line[:980], atol=1e-9)
    noise = np.random.default_rng(0).normal(size=5000)
    assert np.std(smoothed(noise.tolist())[500:]) < 0.15 * np.std(noise)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ticks(0, 10, 4), "0 5 10"),
        (ticks(0.12, 0.31, 4), "0.15 0.2 0.25 0.3"),
        (log_ticks(0.5, 30, 8), "0.5 1 2 5 10 20"),
        (log_ticks(1, 1e6, 4), "1 100 10k 1M"),
        ([0, 0.003, 7, 9_999, 20_480, 1.5e6, 3e9], "0 0.003 7 9,999 20.5k 1.5M 3B"),
    ],
    ids=["ticks", "fractions", "log", "log, few", "short"],
)
def test_axis_labels_are_round_and_short(found: list[float], expected: str) -> None:
    assert " ".join(short(value).replace(" ", "") for value in found) == expected


def test_times_on_an_axis_are_short() -> None:
    assert [clock(s) for s in (0.1, 30, 90, 5400, 172800)] == ["0.1 s", "30 s", "1.5 min", "1.5 h", "2 d"]


def test_figures_of_fine_tuning_are_drawn_once_for_each_step() -> None:
    rows: list[dict[str, float]] = [{"step": step, "loss": 1.0, "reward": step / 4} for step in (1, 2, 3)]
    metrics = Metrics([*rows, {"step": 3, "validation_loss": 1.0, "reward": 9.0}], [])
    assert recorded(metrics)["reward"][""] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "mean over the generated completions" in charts(metrics)
    assert "step 3, reward 0.75" in sample_article({"step": 3, "prompt": "1+1=", "text": "2", "reward": 0.75})


def test_rewards_of_a_sum_are_drawn_with_it_and_the_sum_is_the_figure() -> None:
    rows: list[dict[str, float]] = [
        {"step": step, "loss": 1.0, "reward": 0.25, "reward/exact": 1.0, "reward/mine.py/f": 0.5} for step in (1, 2)
    ]
    drawn = charts(Metrics(rows, []), Metrics(rows, []), "before")
    assert "<h3>reward <b>0.25</b></h3>" in drawn
    assert all(name in drawn for name in ('"exact"', '"mine.py/f"', '"before"'))
    sample = {"step": 3, "prompt": "1+1=", "text": "2", "reward": 0.75, "rewards": {"<exact>": 1.0, "b": None}}
    assert "step 3, reward 0.75, &lt;exact&gt; 1</h3>" in sample_article(sample)


def test_curves_have_ticks_of_fractions_and_of_numbers_below_0() -> None:
    for ends, wanted in (
        ((-2.0, 2.0), ["-2", "-1", "0", "1", "2"]),
        ((0.0, 1.0), ["0", "0.2", "0.4"]),
        ((8.9, 11.3), ["9", "9.5", "10", "10.5", "11"]),
    ):
        svg = curves("a", np.linspace(*ends, 9).tolist(), {"b": np.arange(9)}, x_name="x").body
        assert all(f'text-anchor="middle">{label}</text>' in svg for label in wanted)
