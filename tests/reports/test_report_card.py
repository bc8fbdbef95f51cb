"""The report card: recorded figures, stored scores, and published figures that were measured in the same way."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results

import onward
from onward import DecoderConfig, Run
from onward.cli import main
from onward.planning.parameters import parameters
from onward.planning.releases import find
from onward.reports import RunRecord
from onward.reports.runs.published import figures, nearest
from onward.reports.runs.report_card import report_card
from onward.reports.runs.scores import TaskScore, keep_scores, read_scores

from support.pages import HOSTILE, Page, write_run, written
from support.runs import config

CONFIG = DecoderConfig(vocab_size=30, d_model=16, n_layers=2, n_heads=4, context_length=64)


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, without scores."""
    folder = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    (folder / "tasks.jsonl").unlink(missing_ok=True)
    return folder


def test_published_figures_are_shares_or_bits_and_have_a_source() -> None:
    for figure in figures():
        assert 0 < figure.score < (1 if figure.metric != "bits per byte" else 8)
        assert figure.source.startswith(("https://github.com/", "Radford et al. 2019"))
    keys = [(f.model, f.suite, f.task, f.metric, f.examples) for f in figures()]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "pythia-70m", "pythia-160m"])
def test_published_sizes_are_those_of_the_decoders(name: str) -> None:
    sizes = {figure.model.lower().replace("gpt-2", "gpt2").replace(" ", "-"): figure.parameters for figure in figures()}
    assert sizes[name] == parameters(find(name)[1])


def test_nearest_figures_were_measured_in_the_same_way() -> None:
    models = [figure.model for figure in nearest(140_000_000, "lm-evaluation-harness", "piqa", "acc", 0)]
    assert models == ["Pythia 160m", "Pythia 70m"]
    assert [figure.model for figure in nearest(600_000_000, "CORE", "CORE", "centered", 0)] == [
        "nanochat d20",
        "GPT-2 Large",
    ]
    assert nearest(1, "lm-evaluation-harness", "piqa", "acc", 5) == []
    assert nearest(1, "CORE", "piqa", "acc", 0) == []


def test_the_newest_scores_of_the_weights_are_read(tmp_path: Path) -> None:
    rows = [TaskScore(5, "a", 0.1), TaskScore(6, "a", 0.2), TaskScore(6, "a", 0.3), TaskScore(6, "a", 0.4, examples=2)]
    keep_scores(tmp_path, rows)
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write('{"step": 6, "task": 3}\n{"step": 6}\n[1]\n{"step"')
    assert [one.score for one in read_scores(tmp_path, 6)] == [0.3, 0.4]
    assert read_scores(tmp_path, 7) == read_scores(tmp_path / "absent", 6) == []


SHOWN = {"above": (0.4, 0.05, 0.25, True), "within": (0.34, 0.05, 0.25, False), "unknown": (0.4, None, 0.25, None)}


@pytest.mark.parametrize("name", SHOWN)
def test_a_score_above_guessing_by_two_errors_shows_an_ability(name: str) -> None:
    score, error, chance, shown = SHOWN[name]
    assert TaskScore(1, "a", score, error=error, chance=chance).shown is shown


def test_the_card_says_what_is_on_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    keep_scores(run, [TaskScore(40, "copying", 0.26, error=0.03, chance=0.25, questions=200)])
    card = report_card(RunRecord(run), CONFIG, None)
    named = dict(card.facts)
    assert named["trained on"] == "20,480 tokens in 40 steps"
    assert named["validation loss"] == "2.7500 nats per token"
    assert named["computation"].endswith(" FLOPs")
    assert card.scores == [("copying", "0.260 ± 0.030", "0.250", "0", "200", "Onward")]
    assert card.samples[-1] == ("to be", " sample 40")
    assert any("not above guessing" in limit and "copying" in limit for limit in card.limits)
    assert any("at most 64 tokens" in limit for limit in card.limits)


def test_texts_of_a_card_stay_texts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    keep_scores(run, [TaskScore(40, HOSTILE.replace("\ud800", ""), 0.1, error=0.1, chance=0.1)])
    page, parsed = written(run)
    assert isinstance(parsed, Page)
    assert parsed.open == []
    assert "alert(1)" in parsed.text
    assert "<img src=x" not in page


def test_evaluate_keeps_scores_for_the_page_and_the_cards(run: Path, tmp_path: Path) -> None:
    tasks = "copying, mapping(shots=1), cloze(before=6, after=2)"
    assert main(["evaluate", str(run), "--tasks", tasks, "--limit", "20"]) == 0
    found = {one.task: one for one in onward.load(run).evaluate_tasks("copying, mapping(shots=1)", limit=20)}
    kept = {one.task: one for one in RunRecord(run).scores}
    assert [*kept] == ["copying", "mapping, 1 examples", "cloze(before=6, after=2)"]
    assert {name: one.examples for name, one in found.items()} == {"copying": 0, "mapping, 1 examples": 1}
    for task, one in found.items():
        assert (kept[task].score, kept[task].error, kept[task].chance) == (one.score, one.error, one.chance)
    assert main(["report", str(run)]) == 0
    for file in "report.html", "card.md":
        text = (run / file).read_text()
        for part in "copying", "mapping, 1 examples", "GPT-2", "Limitations", "FLOPs":
            assert part in text, (file, part)
    assert main(["card", str(run), "--license", "mit", "--out", str(tmp_path / "README.md")]) == 0
    data = ModelCard((tmp_path / "README.md").read_text()).data.to_dict()
    name, results = model_index_to_eval_results(data["model-index"])
    assert name == "tiny"
    values = {(one.dataset_name, one.metric_type): one.metric_value for one in results}
    assert values["copying", "accuracy"] == pytest.approx(kept["copying"].score, abs=1e-6)
    assert values["validation text", "perplexity"] == pytest.approx(
        json.loads((run / "result.json").read_text())["perplexity"], rel=1e-4
    )


def test_scores_of_changed_weights_are_not_kept(run: Path) -> None:
    assert main(["evaluate", str(run), "--tasks", "copying", "--limit", "5", "--quantize", "int8"]) == 0
    assert RunRecord(run).scores == []


def test_a_run_with_tasks_ends_with_their_scores(story_file: Path, tmp_path: Path) -> None:
    from onward.reports.runs.write import conclude

    run = Run.start(config(story_file, tmp_path / "run", evaluate_tasks="copying", task_limit=10))
    list(run.train())
    conclude(run)
    (score,) = RunRecord(run.folder).scores
    last = [row for row in RunRecord(run.folder).metrics.validations if row["step"] == 30]
    assert (score.step, score.task, score.score) == (30, "copying", last[0]["task/copying"])
    assert "copying" in (run.folder / "card.md").read_text()
