"""The page of a run: well-formed, safe, complete, and with the recorded numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward import Alibi, Decoder, DecoderConfig, Experts, Rotary
from onward.reports import RunRecord
from onward.reports.runs.curve import write_loss_svg
from onward.reports.runs.metrics import read_metrics
from onward.reports.runs.record import options_in_effect
from onward.reports.runs.report import write_report

from support.pages import HOSTILE, TEXT, Page, model_and_tokenizer, paths, plots, write_lines, write_run, written


def test_page_is_well_formed_and_needs_no_other_file(tmp_path: Path) -> None:
    page, parsed = written(write_run(tmp_path / "run"))
    assert parsed.open == []
    rest = page.replace("</", "").replace("hf://NAME", "")  # mentioned in the page as a possible source
    assert not re.search(r"https?:|//\w|@import|url\((?!#)", rest)
    given = [a[name] for _, a in parsed.tags for name in ("src", "href", "srcset", "action") if name in a]
    assert all(address.startswith("data:image/png;base64,") for address in given)
    assert "default-src 'none'" in page
    assert len(page.encode()) < 500_000
    assert "<!--" not in page.removeprefix("<!doctype html>")
    assert [p.name for p in tmp_path.joinpath("run").glob(".*")] == []


def test_page_shows_the_figures_of_the_run(tmp_path: Path) -> None:
    _, parsed = written(write_run(tmp_path / "hamlet"))
    shown = ["hamlet", "2.7500", "15.64", "1.8750", "20.5 k", "2,048", "2 min 13 s", "in 40 steps"]
    shown += ["play, version Q2, sha256 0123456789ab…", "sample 0", "sample 40", torch.__version__]
    assert [text for text in shown if text not in parsed.text] == []
    assert "stopped" not in parsed.text
    assert "shards file" not in parsed.text


def test_page_says_why_the_last_validation_is_not_the_final_loss(tmp_path: Path) -> None:
    _, parsed = written(write_run(run := tmp_path / "run"))
    assert "3.1000 at step 40, is measured during training on a sample of 99 tokens in bf16" in parsed.text
    assert "the final validation loss, 2.7500, on 99 tokens in fp32" in parsed.text
    (run / "result.json").write_text('{"loss": 3.1}')
    assert "is measured during training on a sample" not in written(run)[1].text


def test_options_are_shown_with_the_values_in_effect() -> None:
    model, options = DecoderConfig(9, d_model=64, n_layers=1, n_heads=1), {"steps": 400, "sources": ["a.txt"]}
    rows = {name: value for name, value, _ in options_in_effect(options, model)}
    assert rows["learning_rate"] == str(0.5 / 64)
    assert rows["validate_every"] == "20"
    assert rows["steps"] == "400"
    assert rows["sources"] == "a.txt"
    assert rows["compile"] == "no"
    assert "as many as" in rows["loss_chunk"]
    assert "epochs" not in rows
    assert not {"None", "", "[]", "auto"} & set(rows.values())
    assert not {"device", "experts", "balance_loss"} & rows.keys()
    mixture, options = replace(model, mlp=Experts(4, top_k=2)), options | {"device": "cpu", "experts": "loop"}
    rows = {name: value for name, value, _ in options_in_effect(options, mixture)}
    assert (rows["device"], rows["experts"], rows["balance_loss"]) == ("cpu", "loop", "0.01")


def test_data_are_a_table_of_sources_and_of_dropped_documents(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    source = {"name": "a.txt", "documents": 3, "tokens": 12_345, "bytes": 65_589, "listing": "b" * 64}
    report = {"bytes_per_token": 0.9999847537734411, "dropped": {"too short": 7}}
    (run / "data/data.json").write_text(json.dumps({"version": 2, "sources": [source], "report": report}))
    page, _ = written(run)
    table = page[page.index("<summary>The data") :].partition("</table>")[0]
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", table)
    assert cells[:4] == ["source", "documents", "tokens", "bytes"]
    assert cells[4:] == ["a.txt", "3", "12,345", "65,589", "dropped: too short", "7", "", ""]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"mlp": Experts(count=4, top_k=2, d_ff=12)}, "feed-forwardexperts, 4 of width 12"),
        ({"position": Alibi()}, "positionsalibi"),
        ({"position": Rotary(theta=5e5)}, "positionsrotary, theta 500,000"),
    ],
    ids=["experts", "alibi", "rotary"],
)
def test_page_describes_the_parts_of_the_model(parts: dict[str, Any], expected: str, tmp_path: Path) -> None:
    model = Decoder(DecoderConfig(vocab_size=20, d_model=16, n_layers=2, n_heads=4, **parts))
    write_report(tmp_path / "page.html", RunRecord(tmp_path), model, None, "")
    assert expected in Page((tmp_path / "page.html").read_text(encoding="utf-8")).text


def test_stopped_run_shows_where_it_stopped_and_its_last_validation(tmp_path: Path) -> None:
    _, parsed = written(write_run(tmp_path / "run", steps=25))
    assert "stopped at step 25 of 40" in parsed.text
    assert "onward train --resume" in parsed.text
    assert "3.3000" in parsed.text
    assert "at step 20" in parsed.text


def test_text_stays_text_wherever_it_comes_from(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>")
    write_lines(run / "samples.jsonl", [{"step": HOSTILE, "prompt": HOSTILE, "text": HOSTILE}])
    (run / "run.json").write_text(json.dumps({"sources": [HOSTILE], HOSTILE: HOSTILE, "tokenizer": HOSTILE}))
    (run / "data/data.json").write_text(json.dumps({HOSTILE: {"sha256": HOSTILE}}))
    harmless = HOSTILE.replace("\ud800", "")
    other = write_run(tmp_path / '"<i>')
    config = {"model_type": "onward", "decoder": {"vocab_size": 9, "d_model": 8, "n_layers": 1, "n_heads": 1}}
    (other / "config.json").write_text(json.dumps(config))
    page, parsed = written(run, text=f"to {harmless} be", extra=harmless)
    compared, parsed_compared = written(run, text=f"to {harmless} be", extra=harmless, other=other)
    _, reference = written(write_run(tmp_path / "plain"))
    assert parsed.open == parsed_compared.open == []
    names = lambda tags: {(tag, name) for tag, attributes in tags for name in attributes}
    assert names(parsed.tags) <= names(reference.tags)
    assert [tag for tag, _ in parsed.tags].count("script") == [tag for tag, _ in reference.tags].count("script")
    assert "<script>alert" not in page + compared
    assert "<i>" not in compared
    assert "alert(1)" in parsed.text
    assert "\x00" not in page
    assert json.loads(parsed.scripts["attention"])["pieces"][4].startswith("</script><script>alert(1)")


PARTIAL = {
    "nothing at all": {},
    "no step yet": {"metrics.jsonl": ""},
    "one step": {"metrics.jsonl": '{"step": 1, "loss": 3.4}\n'},
    "a line cut off": {"metrics.jsonl": '{"step": 1, "loss": 3.4, "tokens": 5, "seconds": 0.1}\n{"step": 2, "lo'},
    "lines of another kind": {
        "metrics.jsonl": '7\n[]\n\n{"step": "x"}\n{"step": 0, "loss": 1}\n{"step": 3, "loss": NaN}\n'
    },
    "only a validation": {"metrics.jsonl": '{"step": 5, "validation_loss": 3.0}\n'},
    "a broken configuration": {"run.json": "{", "result.json": "[]", "samples.jsonl": "\x00"},
    "values of another kind": {"run.json": '{"steps": "x", "sources": 7}', "result.json": '{"loss": null}'},
    "no text in a sample": {"samples.jsonl": "{}\n"},
    "rollbacks of another kind": {
        "metrics.jsonl": '{"reason": 1}\n{"reason": "x", "step": "y"}\n{"reason": [], "failed_step": 2, "skipped": 3}\n'
        '{"step": 1, "loss": 0, "grad_norm": 0}\n{"step": 2, "loss": 0, "grad_norm": 0, "dead_units/": -1}\n'
    },
    "numbers out of range": {
        "metrics.jsonl": '{"step": 1, "loss": 1e308, "grad_norm": 1e99, "tokens": -5, "seconds": -1}\n'
        f'{{"step": 2, "loss": {"9" * 400}, "grad_norm": 1e-99, "tokens": 1e99, "seconds": 1e99}}\n'
        '{"step": 7e9, "loss": 2, "grad_norm": -3}\n{"step": 1.5, "loss": -2, "learning_rate": Infinity}\n',
        "run.json": '{"steps": 1e999}',
        "result.json": f'{{"loss": {"9" * 400}, "seconds": -1}}',
    },
    "equal losses": {"metrics.jsonl": '{"step": 1, "loss": 2}\n{"step": 2, "loss": 2, "learning_rate": 0.0}\n'},
}


@pytest.mark.parametrize("files", PARTIAL.values(), ids=PARTIAL)
def test_page_shows_all_that_a_folder_holds(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    _, parsed = written(tmp_path, text="t")
    assert parsed.open == []
    assert "parameters" in parsed.text
    metrics = read_metrics(tmp_path)
    assert ("mean negative log-probability" in parsed.text) == bool(metrics.steps)
    assert (write_loss_svg(tmp_path, 20) is None) == (not metrics.steps)


def test_model_without_tokenizer_has_a_page(tmp_path: Path) -> None:
    model, _ = model_and_tokenizer()
    write_report(tmp_path / "page.html", RunRecord(tmp_path), model, None, "text")
    parsed = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "8,880 parameters" in parsed.text
    assert "attention" not in parsed.scripts


@pytest.mark.long
def test_long_run_of_a_large_model_has_a_small_page(tmp_path: Path) -> None:
    write_health(run := write_run(tmp_path / "run"), steps=10_000, layers=40)
    write_lines(run / "samples.jsonl", [{"step": i, "prompt": "to", "text": "x" * 9_000} for i in range(500)])
    _, tokenizer = model_and_tokenizer()
    model = Decoder(
        DecoderConfig(tokenizer.vocab_size, d_model=32, n_layers=40, n_heads=32, d_head=2, context_length=64)
    )
    write_report(run / "report.html", RunRecord(run), model.eval(), tokenizer, TEXT)
    assert (run / "report.html").stat().st_size < 1_500_000


TITLES = ["learning rate", "gradient norm", "update ratio", "attention entropy", "dead units", "expert load"]


def write_health(run: Path, steps: int, layers: int) -> None:
    """Write steps with the load of experts, a spike of the gradient norm, figures that are measured only at some steps,
    and two rollbacks."""
    layered = lambda name, values: {f"{name}/{layer}": value for layer, value in enumerate(values)}
    rows = [
        {"step": 30, "failed_step": 37, "reason": "the loss is nan", "skipped": [296, 304]},
        {"step": 0, "failed_step": 5, "reason": HOSTILE, "skipped": [HOSTILE, 1]},
    ]
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 3.0, "learning_rate": 1e-3 * step / steps, "grad_norm": 2.0 - (step == 33)}
        row |= {"tokens": 512, "seconds": 0.25 + (step > steps // 2)}
        row["grad_norm"] += 40 * (step == steps // 2)
        rows.append(row | layered("expert_load", [1 + layer + 1 / step for layer in range(layers)]))
        if step % 10 == 0:
            ratio = 0.5 if step == 10 else 0.0015
            row = {"step": step, "validation_loss": 3.1, "update_ratio": ratio}
            rows.append(row | layered("attention_entropy", [2.0] * layers) | layered("dead_units", [0.25] * layers))
    write_lines(run / "metrics.jsonl", rows)


def test_loss_curve_reads_out_the_recorded_values(tmp_path: Path) -> None:
    page, _ = written(write_run(tmp_path / "run"))
    loss = plots(page)["loss"]
    series = {one["name"]: one for one in loss["series"]}
    steps, seconds, tokens = loss["places"][series["this step"]["places"]]
    assert steps == list(range(1, 41))
    assert seconds == [step / 4 for step in steps]
    assert tokens == [512 * step for step in steps]
    assert series["this step"]["values"] == pytest.approx([3.4 - step / 100 for step in steps])
    assert series["validation"]["values"] == pytest.approx([3.4, 3.3, 3.2, 3.1])
    assert loss["places"][series["validation"]["places"]][2] == [5120, 10240, 15360, 20480]


def test_ticks_are_round_on_each_axis(tmp_path: Path) -> None:
    write_health(run := write_run(tmp_path / "run"), steps=3600, layers=1)
    ticks = plots(written(run)[0])["loss"]["ticks"]
    labels = {axis: [[label for _, label in kind] for kind in kinds] for axis, kinds in ticks.items()}
    assert labels["step"][0] == ["500", "1,000", "1,500", "2,000", "2,500", "3,000", "3,500"]
    assert labels["step"][1] == ["1", "3", "10", "30", "100", "300", "1,000", "3,000"]
    assert labels["seconds"][0] == ["10 min", "20 min", "30 min", "40 min"]
    assert labels["seconds"][1] == ["1 s", "10 s", "1 min", "10 min"]
    assert labels["tokens"][0] == ["500 k", "1 M", "1.5 M"]


def test_small_charts_have_a_line_for_each_layer(tmp_path: Path) -> None:
    write_health(run := write_run(tmp_path / "run"), steps=400, layers=3)
    page, parsed = written(run)
    assert parsed.open == []
    charts = plots(page)
    assert list(charts) == ["loss", *TITLES]
    names = {title: [one["name"] for one in charts[title]["series"] if one["name"]] for title in TITLES}
    assert names["gradient norm"] == ["gradient norm"]
    assert names["expert load"] == names["dead units"] == ["layer 0", "layer 1", "layer 2"]
    for title, now in zip(TITLES, ("0.001", "2", "0.0015", "2", "0.25", "2")):
        assert f"{title} {now}" in parsed.text
    rate = np.array(paths(page, "learning rate")[0])
    heights = (98 - rate[:, 1]) / 90
    np.testing.assert_allclose((rate[:, 0] - 50) / 222, heights, atol=0.02)
    last = [line[-1][1] for line in paths(page, "expert load")]
    np.testing.assert_allclose([(98 - y) / (98 - last[2]) for y in last], [1 / 3, 2 / 3, 1], atol=0.01)


def test_early_spike_does_not_flatten_the_update_ratio(tmp_path: Path) -> None:
    write_health(run := write_run(tmp_path / "run"), steps=400, layers=1)
    heights = np.array(paths(written(run)[0], "update ratio")[0])[:, 1]
    assert heights[0] < 20  # the spike of 0.5 is at the top
    assert 80 < heights[5] < 97  # the value 0.0015 is drawn above the axis
    charts = plots(written(run)[0])
    assert charts["update ratio"]["series"][-1]["values"][0] == 0.5


def test_jump_of_a_single_step_is_on_the_chart_however_long_the_run(tmp_path: Path) -> None:
    write_health(run := write_run(tmp_path / "run"), steps=9001, layers=1)
    points = np.array(paths(written(run)[0], "gradient norm")[0])
    assert len(points) <= 160
    jump = points[points[:, 1].argmin()]
    assert jump[1] < 20
    assert jump[0] == pytest.approx(161, abs=222 / 160)
    assert (points[:, 1] > 60).sum() == len(points) - 1


def test_rollback_is_marked_in_each_plot_and_described(tmp_path: Path) -> None:
    write_health(run := write_run(tmp_path / "run"), steps=73, layers=1)
    page, parsed = written(run)
    sentence = "Step 37 failed (the loss is nan): the run went back to step 30 and left out the windows 296 to 303."
    assert sentence in parsed.text
    assert "Step 5 failed (</script><script>alert(1)" in parsed.text
    assert "<script>alert" not in page
    assert parsed.open == []
    marks = [attributes["d"] for tag, attributes in parsed.tags if attributes.get("class") == "rollback"]
    assert len(marks) == 1 + len(TITLES)
    assert all(mark.startswith("M161.0 8V98M") for mark in marks[1:])  # step 37 of 73: in the middle


def test_run_without_rollback_has_no_word_of_one(tmp_path: Path) -> None:
    page, parsed = written(write_run(tmp_path / "run"))
    assert list(plots(page)) == ["loss", "learning rate", "gradient norm"]
    assert "rollback" not in parsed.text
    _, parsed = written(tmp_path)
    assert "Diagnostics" not in parsed.text


def test_second_run_is_drawn_over_the_first_and_compared(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other", steps=25)
    options = json.loads((other / "run.json").read_text()) | {"optimizer": "muon"}
    (other / "run.json").write_text(json.dumps(options))
    decoder = {"vocab_size": 99, "d_model": 16, "n_layers": 3, "n_heads": 4, "context_length": 64}
    (other / "config.json").write_text(json.dumps({"model_type": "onward", "decoder": decoder}))
    page, parsed = written(run, other=other)
    loss = plots(page)["loss"]
    series = {one["name"]: one for one in loss["series"]}
    assert loss["places"][series["other: training"]["places"]][0] == list(range(1, 26))
    assert series["other: validation"]["values"] == [3.4, 3.3]
    assert "other" in [one["name"] for one in plots(page)["gradient norm"]["series"]]
    table = page[page.index("<h2>Comparison") : page.index("<h2>Loss")]
    rows = {
        cells[0]: cells[1:]
        for cells in (re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in table.split("<tr>"))
        if cells
    }
    assert rows["validation loss"] == ["2.7500", "3.3000"]
    assert rows["optimizer"] == ["adamw", "muon"]
    assert rows["layers"] == ["2 of width 16, context 64", "3 of width 16, context 64"]
    assert "schedule" not in rows
    assert "vocabularies differ" in parsed.text
