"""Published scaling laws give their published optima, and fits recover a known law."""

import json
import math
import os
import shutil
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from onward import UserError
from onward.cli import main
from onward.planning import LAWS, LossLaw, RunPoint, Unreliable, fit_loss, fit_power, flops_for, smaller_models
from onward.planning.fits import LossFit, fit_frontier, parabolas
from onward.planning.tables import amount, read_table
from onward.reports.pictures.law_pictures import fit_picture
from onward.reports.runs.record import finished_runs

LAW = LossLaw(1.7, 400.0, 1000.0, 0.34, 0.30)
PUBLISHED = {  # arXiv:2203.15556, tables 3 and A3: parameters, FLOPs and tokens
    "Chinchilla 1": [
        (400e6, 1.92e19, 8.0e9),
        (10e9, 1.23e22, 205.1e9),
        (67e9, 5.76e23, 1.5e12),
        (1e12, 1.27e26, 21.2e12),
    ],
    "Chinchilla 2": [
        (400e6, 1.84e19, 7.7e9),
        (10e9, 1.32e22, 219.5e9),
        (67e9, 6.88e23, 1.7e12),
        (1e12, 1.59e26, 26.5e12),
    ],
}


def runs(noise: float = 0.0, law: LossLaw = LAW, widest: float = 8.0) -> list[RunPoint]:
    """Sixteen model sizes around the optimum for each of nine budgets from 1e17 to 1e21."""
    random, found = np.random.default_rng(0), []
    for flops in np.logspace(17, 21, 9):
        best = law.optimum(flops)[0]
        for size in best * np.logspace(-math.log10(widest), math.log10(widest), 16):
            tokens = flops / 6 / size
            found.append(
                RunPoint(float(size), float(tokens), law.loss(size, tokens) * math.exp(noise * random.normal()))
            )
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_law_gives_the_rows_of_its_table(name: str) -> None:
    law = next(law for law in LAWS if law.name == name)
    for parameters, flops, tokens in PUBLISHED[name]:
        assert law.optimum(flops) == pytest.approx((parameters, tokens), rel=0.06)
        assert flops_for(law, parameters=parameters) == pytest.approx(flops, rel=0.12)
        assert law.range(flops)[0] < parameters < law.range(flops)[1]


def test_the_fit_of_2024_advises_about_twenty_tokens_per_parameter() -> None:
    refit = next(law for law in LAWS if law.name == "re-fit of 2024")
    for flops in (1e18, 1e21, 1e25):
        parameters, tokens = refit.optimum(flops)
        assert 17 <= tokens / parameters <= 26
        assert 6 * parameters * tokens == pytest.approx(flops)


def test_an_optimum_has_the_least_loss_of_its_budget() -> None:
    best, tokens = LAW.optimum(1e20)
    for factor in (0.9, 1.1):
        assert LAW.loss(best * factor, tokens / factor) > LAW.loss(best, tokens)


def test_smaller_models_reach_the_same_loss_and_cost_less_to_use() -> None:
    flops = 1e22
    models = smaller_models(LAW, flops, answered=1e13)
    assert models[0].training == pytest.approx(flops)
    loss = LAW.loss(*LAW.optimum(flops))
    for one, smaller in pairwise(models):
        assert LAW.loss(smaller.parameters, smaller.tokens) == pytest.approx(loss)
        assert smaller.training > one.training
        assert smaller.answering < one.answering


def test_fits_recover_a_known_law() -> None:
    """The fitted exponents are within 0.01 of the true ones, and so is that of the optimal size, fitted from parabolas
    on a symmetric grid."""
    noisy = runs(noise=1e-3)
    fit = fit_loss(noisy, resamples=40)
    assert fit.law.alpha == pytest.approx(LAW.alpha, abs=0.01)
    assert fit.law.beta == pytest.approx(LAW.beta, abs=0.01)
    for name, value in vars(LAW).items():
        low, high = fit.intervals[name]
        assert low - 0.01 * value <= value <= high + 0.01 * value
    exponent = LAW.beta / (LAW.alpha + LAW.beta)
    assert fit_frontier(parabolas(noisy)).exponent == pytest.approx(exponent, abs=0.01)
    budgets = np.logspace(17, 21, 9).tolist()
    power = fit_power(budgets, [LAW.loss(*LAW.optimum(c)) for c in budgets])
    assert power.exponent == pytest.approx(LAW.alpha * LAW.beta / (LAW.alpha + LAW.beta), abs=0.002)
    assert power.floor == pytest.approx(LAW.E, abs=0.01)


def test_a_best_size_outside_the_runs_is_warned_of() -> None:
    some = [run for run in runs() if run.parameters < LAW.optimum(run.flops)[0] / 2]
    with pytest.warns(Unreliable, match="outside the sizes that were trained"):
        found = parabolas(some)
    assert not any(one.inside for one in found)
    with pytest.raises(UserError, match="fewer than two budgets have their best size between"):
        fit_frontier(found)


def test_a_model_that_more_tokens_made_worse_is_named() -> None:
    with pytest.warns(Unreliable, match="1e.08 parameters is worse after 2e.09 tokens"):
        parabolas([RunPoint(1e8, 1e9, 3.0), RunPoint(1e8, 2e9, 3.1), RunPoint(2e8, 1e9, 2.9), RunPoint(2e8, 2e9, 2.8)])


TABLES = {
    "no column": ("n,d\n1e6,1e7\n", "has no column loss"),
    "a text": ("n,d,loss\n1e6,1e7,much\n", "line 2: loss is 'much', which is not a number"),
    "NaN": ("n,d,loss\n1e6,1e7,3\n2e6,1e7,nan\n", "line 3: loss is nan: leave out runs without a result"),
    "an empty cell": ("n,d,loss\n1e6,,3\n", "line 2 has no d: leave out runs without a result"),
    "a short row": ("n,d,loss\n\n1e6,1e7,3\n1e6,1e7\n", "line 4 has no loss: leave out runs without a result"),
    "a long row": ("n,d,loss\n1,000,1e7,3\n", "line 2 has more cells than the table has columns"),
    "nothing": ("", "has no column parameters \\(it has none\\)"),
    "too few": ("n,d,loss\n1e6,1e7,3\n2e6,1e7,2.9\n", "Cannot fit a law to 2 runs"),
    "one size": ("n,d,loss\n" + "1e6,1e7,3\n1e6,2e7,2.9\n" * 3, "all runs have the same size"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_determines_no_law_is_refused(name: str, tmp_path: Path) -> None:
    text, sentence = TABLES[name]
    (path := tmp_path / "runs.csv").write_text(text)
    with pytest.raises(UserError, match=sentence):
        fit_loss(read_table(path))


def test_command_fits_a_table_and_writes_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{run.parameters},{run.flops},{run.loss}" for run in runs()]
    (path := tmp_path / "runs.csv").write_text("\n".join(["Model Size,Training FLOP,loss", *rows]))
    assert main(["scaling", "fit", str(path), "--json", "--out", str(tmp_path / "fit.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["law"] == pytest.approx(vars(LAW), rel=0.01)
    assert not found["warnings"]
    largest = max(run.flops for run in runs())
    assert found["forecast"]["loss"] == pytest.approx(LAW.loss(*LAW.optimum(10 * largest)), abs=1e-3)
    assert (tmp_path / "fit.svg").read_text().startswith("<svg")


def test_command_fits_finished_runs_and_names_the_others(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "finished", "stopped", "unvalidated":
        shutil.copytree(tiny_run, tmp_path / name)
    (tmp_path / "stopped/result.json").unlink()
    for file in "result.json", "metrics.jsonl":
        (tmp_path / "unvalidated" / file).write_text("{}")
    points, _ = finished_runs(tmp_path)
    assert len(points) == 1
    assert main(["scaling", "fit", str(tmp_path)]) == 2
    left_out = f"{tmp_path / 'stopped'} (stopped), {tmp_path / 'unvalidated'} (no validation loss)"
    assert capsys.readouterr().err.startswith(f"left out: {left_out}\nonward: Cannot fit a law to 1 run")


@pytest.mark.skipif("ONWARD_CHINCHILLA_POINTS" not in os.environ, reason="docs/planning.md says where the table is")
def test_the_fit_of_2024_is_reproduced_from_its_points() -> None:
    points = sorted(read_table(Path(os.environ["ONWARD_CHINCHILLA_POINTS"])), key=lambda run: run.loss)
    fit = fit_loss(points[:-5])
    published = {"A": (482.006, 124.522), "B": (2085.434, 1293.284), "E": (1.817, 0.026), "alpha": (0.348, 0.015)}
    for name, (value, error) in (published | {"beta": (0.366, 0.021)}).items():  # values with standard errors
        assert abs(getattr(fit.law, name) - value) < error, name
    assert fit.objective < 0.00101828


def test_runs_that_determine_no_law_are_fitted_with_a_warning_and_without_a_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{n},{d},{3 + 1e-7 * n + 1e4 / d}" for n in (1e5, 2e5, 4e5, 8e5) for d in (1e5, 2e5, 4e5)]
    (path := tmp_path / "runs.csv").write_text("\n".join(["n,d,loss", *rows]))
    assert main(["scaling", "fit", str(path), "--json", "--out", str(tmp_path / "fit.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["forecast"] is None
    assert len({*found["warnings"]}) == len(found["warnings"]), "none is said twice"
    assert any("do not determine a law" in warning for warning in found["warnings"])
    assert "residuals" in (tmp_path / "fit.svg").read_text()


@pytest.mark.filterwarnings("ignore:.*outside the sizes that were trained")
def test_a_picture_separates_best_sizes_outside_the_trained_sizes() -> None:
    def curve_names(some: list[RunPoint]) -> set[str]:
        panels = fit_picture(fit_loss(some, resamples=0), some, parabolas(some), None).panels
        panel = next(panel for panel in panels if panel.title == "parameters of the best model")
        low, high = min(run.parameters for run in some), max(run.parameters for run in some)
        for name, sizes in panel.data["series"].items():
            known = [size for size in sizes if size is not None]
            assert all((size > high) == ("above" in name) and (size < low) == ("below" in name) for size in known)
        return {name for name, sizes in panel.data["series"].items() if any(size is not None for size in sizes)}

    assert curve_names(runs()) == {"L(N, D)"}  # sizes up to eight times the best; the picture ends at about three times
    narrow = [run for run in runs() if run.parameters < LAW.optimum(1e20)[0]]
    assert curve_names(narrow) == {"L(N, D)", "L(N, D), above the trained sizes"}


def test_forecast_has_an_interval_that_holds_the_truth() -> None:
    some = runs(noise=5e-3)[::3]
    forecast = fit_loss(some, resamples=100).forecast(*LAW.optimum(1e22))
    assert forecast.low < LAW.loss(*LAW.optimum(1e22)) < forecast.high
    assert forecast.low < forecast.loss < forecast.high
    assert forecast.high - forecast.low < 0.1


@pytest.mark.filterwarnings("error")
def test_one_resampled_law_without_bounds_leaves_the_forecast_its_interval() -> None:
    wild = LossLaw(1.0, math.inf, 1.0, alpha=400.0, beta=1.0)  # inf / inf
    forecast = LossFit(LAW, 0.0, {}, [0.0], [*[LAW] * 99, wild]).forecast(1e5, 1e6)
    assert forecast.low == forecast.loss == forecast.high


def test_command_tells_the_optima(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scaling", "optimum", "--hours", "24", "--device", "h100", "--out", str(tmp_path / "o.svg")]
    assert main([*words, "--requests", "1e12"]) == 0
    said = capsys.readouterr()
    assert "re-fit of 2024" in said.out
    assert main(["scaling", "optimum", "--params", "7B", "--json"]) == 0
    assert all(row["parameters"] == pytest.approx(7e9) for row in json.loads(capsys.readouterr().out)["laws"])
    assert main(["scaling", "optimum", "--params", "1e16"]) == 0
    assert "10,000 T" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("optimum", "give one of --flops"),
        ("optimum --flops 1e21 --params 1B", "give one of --flops"),
        ("optimum --flops much", "--flops is 'much': write a positive number"),
        ("optimum --hours 2 --device h10", "--device is 'h10': did you mean h100?"),
        ("fit", "no runs: name a folder of runs"),
        ("fit nothing.csv", "Cannot read nothing.csv"),
    ],
)
def test_wrong_words_are_refused(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scaling", *words.split()]) == 2
    assert sentence in capsys.readouterr().err.replace("\n", " ")


def test_amounts_have_units() -> None:
    assert [amount(text, "n") for text in ("1e9", "1.5B", "300M", "2k", "1T")] == [1e9, 1.5e9, 3e8, 2e3, 1e12]
    with warnings.catch_warnings(), pytest.raises(UserError, match="n is '-1'"):
        amount("-1", "n")
