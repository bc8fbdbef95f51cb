import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from onward.evaluation.score import logprobs
from onward.inspection.attention import attention_maps, next_tokens
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder
from onward.reports.curve import read_metrics, sample, smoothed, write_loss_svg
from onward.reports.report import write_report
from onward.text.tokenizer import Tokenizer, train_tokenizer

HOSTILE = "</script><script>alert(1)</script><!--name--><img src=x onerror=alert(1)>\x00\x1b[31m\u202e\ud800&amp;\"'"
TEXT = "to be, or\n\tnot to be: that is the question"
VOID = {"meta", "input", "rect", "circle", "line", "path", "img", "link", "br"}


class Page(HTMLParser):
    """A page read with the standard library's parser: the tags that are open at the end, scripts, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            attributes = self.tags[-1][1]
            self.scripts[attributes.get("id") or f"{attributes.get('type')} {len(self.scripts)}"] = data
        elif "style" not in self.open:
            self.text += data


def model_and_tokenizer(extra: str = "") -> tuple[Decoder, Tokenizer]:
    torch.manual_seed(0)
    tokenizer = train_tokenizer("char", [TEXT, extra])
    tokenizer.inner.add_tokens([extra] if extra else [])
    tokenizer = Tokenizer(tokenizer.inner)
    sizes: dict[str, Any] = {"d_model": 16, "n_layers": 2, "n_heads": 4, "context_length": 64}
    model = Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size, **sizes))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model.eval(), tokenizer


def write_run(run: Path, steps: int = 40) -> Path:
    (run / "data").mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        numbers = {"loss": 3.4 - step / 100, "learning_rate": step / 1e4, "grad_norm": 1.0}
        rows.append({"step": step, **numbers, "tokens": 512, "seconds": 0.25})
        if step % 10 == 0:
            rows.append({"step": step, "validation_loss": 3.5 - step / 100, "tokens": 99})
    write = lambda name, text: (run / name).write_text(text, encoding="utf-8")
    write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    samples = [{"step": step, "prompt": "to be", "text": f" sample {step}"} for step in (0, 20, 40)]
    write("samples.jsonl", "".join(json.dumps(row) + "\n" for row in samples))
    write("run.json", json.dumps({"steps": 40, "sources": ["play.txt"], "tokenizer": "char", "model": {"n_layers": 2}}))
    source = {"name": "play", "version": "Q2", "sha256": "0123456789ab" + "c" * 52, "shards": [{"file": "00000.bin"}]}
    write("data/data.json", json.dumps({"documents": 1, "sources": [source]}))
    final = {"loss": 2.75, "perplexity": 15.6, "bits_per_byte": 1.875, "tokens": 99, "bytes": 99, "seconds": 133}
    write("result.json", json.dumps(final))
    return run


def written(run: Path, text: str = TEXT, extra: str = "") -> tuple[str, Page]:
    model, tokenizer = model_and_tokenizer(extra)
    page = write_report(run, model, tokenizer, text).read_text(encoding="utf-8")
    return page, Page(page)


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    page, parsed = written(write_run(tmp_path / "run"))
    assert parsed.open == []
    assert not re.search(r"https?:|//\w|@import|url\(", page.replace("</", ""))
    assert not any(name in attributes for _, attributes in parsed.tags for name in ("src", "href", "srcset", "action"))
    assert "default-src 'none'" in page
    assert len(page.encode()) < 500_000
    assert "<!--" not in page.removeprefix("<!doctype html>")
    assert [p.name for p in tmp_path.joinpath("run").glob(".*")] == []


def test_the_page_tells_the_numbers_of_the_run(tmp_path: Path) -> None:
    _, parsed = written(write_run(tmp_path / "hamlet"))
    told = [
        "hamlet",
        "2.7500",
        "15.64",
        "1.8750",
        "20,480",
        "2,048",
        "2 min 13 s",
        "play, version Q2, sha256 0123456789ab…",
    ]
    told += ["in 40 steps", "sample 0", "sample 40", "model.n_layers", torch.__version__]
    assert [text for text in told if text not in parsed.text] == []
    assert "stopped" not in parsed.text
    assert "shards file" not in parsed.text


def test_the_attention_on_the_page_is_that_of_the_model(tmp_path: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    _, parsed = written(write_run(tmp_path / "run"))
    shown = json.loads(parsed.scripts["attention"])
    tokens = [tokenizer.bos_id, *tokenizer.encode(TEXT)][:32]
    assert shown["pieces"][1:12] == list("to·be,·or↵⇥")
    assert shown["heads"] == 4
    for layer, weights in zip(shown["layers"], attention_maps(model, tokens), strict=True):
        found = np.frombuffer(base64.b64decode(layer), np.uint8).reshape(4, len(tokens), len(tokens)) / 255
        np.testing.assert_allclose(found, weights.numpy(), atol=0.5 / 255 + 1e-6)
        assert not np.triu(found, 1).any()


def test_the_next_token_tables_are_those_of_the_model_and_mark_what_follows(tmp_path: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    page, _ = written(write_run(tmp_path / "run"))
    tokens = [tokenizer.bos_id, *tokenizer.encode(TEXT)][:33]
    tables = re.findall(r"<article><h3>after .*?</article>", page, re.DOTALL)
    assert len(tables) == 32
    true = np.exp(logprobs(model, np.array([tokens]))[0])
    share = lambda p: f"<span>{100 * p:.1f} %</span>" if p >= 0.001 else "<span>1 in "
    for i, (table, likeliest) in enumerate(zip(tables, next_tokens(model, tokens[:32]))):
        rows = re.findall(r"<li.*?</li>", table, re.DOTALL)
        marked = [row for row in rows if "class=true" in row]
        assert len(marked) == 1
        assert share(true[i]) in marked[0]
        assert len(rows) == (10 if tokens[i + 1] in dict(likeliest) else 11)
        assert all(share(p) in row for row, (_, p) in zip(rows, likeliest))


def test_what_the_curve_shows_at_a_step_is_what_was_recorded(tmp_path: Path) -> None:
    _, parsed = written(write_run(tmp_path / "run"))
    shown = [json.loads(text) for name, text in parsed.scripts.items() if name.startswith("application/json")]
    assert len(shown) == 2  # linear and logarithmic
    for rows in shown:
        assert [row[2] for row in rows] == list(range(1, 41))
        assert [row[3] for row in rows] == [round(3.4 - step / 100, 4) for step in range(1, 41)]
        assert [rows[i][6] for i in (0, 9, 18, 39)] == [None, 3.4, 3.4, 3.1]
        assert [row[0] for row in rows] == sorted({row[0] for row in rows})


def test_text_stays_text_wherever_it_comes_from(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>")
    rows = [{"step": HOSTILE, "prompt": HOSTILE, "text": HOSTILE}]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "run.json").write_text(json.dumps({"sources": [HOSTILE], HOSTILE: HOSTILE, "tokenizer": HOSTILE}))
    (run / "data/data.json").write_text(json.dumps({HOSTILE: {"sha256": HOSTILE}}))
    harmless = HOSTILE.replace("\ud800", "")
    page, parsed = written(run, text=f"to {harmless} be", extra=harmless)
    _, reference = written(write_run(tmp_path / "plain"))
    assert parsed.open == []
    names = lambda tags: {(tag, name) for tag, attributes in tags for name in attributes}
    assert names(parsed.tags) <= names(reference.tags)
    assert [tag for tag, _ in parsed.tags].count("script") == [tag for tag, _ in reference.tags].count("script")
    assert "<script>alert" not in page
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
    "one token of text": {"samples.jsonl": '{"step": 1, "prompt": "t"}\n'},
    "troubles of another kind": {
        "metrics.jsonl": '{"reason": 1}\n{"reason": "x", "step": "y"}\n{"reason": [], "failed_step": 2, "skipped": 3}\n'
        '{"step": 1, "loss": 0, "grad_norm": 0}\n{"step": 2, "loss": 0, "grad_norm": 0, "dead_units/": -1}\n'
    },
    "equal losses": {"metrics.jsonl": '{"step": 1, "loss": 2}\n{"step": 2, "loss": 2, "learning_rate": 0.0}\n'},
}


@pytest.mark.parametrize("files", PARTIAL.values(), ids=PARTIAL)
def test_a_run_that_stopped_early_gives_a_page_with_what_there_is(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    _, parsed = written(tmp_path, text="")
    assert parsed.open == []
    assert "parameters" in parsed.text
    metrics = read_metrics(tmp_path)
    assert ("How it learned" in parsed.text) == bool(metrics.steps)
    assert (write_loss_svg(tmp_path, 20) is None) == (not metrics.steps)


def test_a_stopped_run_says_where_it_stopped_and_takes_its_last_validation(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=25)
    (run / "result.json").unlink()
    _, parsed = written(run)
    assert "stopped at step 25 of 40" in parsed.text
    assert "3.300" in parsed.text
    assert "at step 20" in parsed.text


TITLES = ["learning rate", "gradient norm", "update ratio", "attention entropy", "dead units", "expert load"]


def write_health(run: Path, steps: int, layers: int) -> None:
    """Steps with the load of experts and a jump of the gradient, what is measured now and then, and two troubles."""
    layered = lambda name, values: {f"{name}/{layer}": value for layer, value in enumerate(values)}
    trouble = {"step": 30, "failed_step": 37, "reason": "the loss is nan", "skipped": [296, 304]}
    rows = [trouble, {"step": 0, "failed_step": 5, "reason": HOSTILE, "skipped": [HOSTILE, 1]}]
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 3.0, "learning_rate": 1e-3 * step / steps, "grad_norm": 2.0 - (step == 33)}
        row["grad_norm"] += 40 * (step == steps // 2)
        rows.append(row | layered("expert_load", [1 + layer + 1 / step for layer in range(layers)]))
        if step % 10 == 0:
            row = {"step": step, "validation_loss": 3.1, "update_ratio": 0.0015}
            rows.append(row | layered("attention_entropy", [2.0] * layers) | layered("dead_units", [0.25] * layers))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def chart_lines(page: str) -> dict[str, list[list[tuple[float, ...]]]]:
    """The points of each line of each small chart."""
    found = {}
    for title, svg in re.findall(r"<figure><h3>([a-z ]+) <b>.*?(<svg.*?</svg>)", page):
        paths = re.findall(r'd="M(.*?)"', svg)
        found[title] = [[tuple(map(float, point.split())) for point in d.split("L")] for d in paths]
    return found


def test_the_small_charts_show_what_was_recorded_a_line_for_each_layer(tmp_path: Path) -> None:
    write_health(run := write_run(tmp_path / "run"), steps=400, layers=3)
    page, parsed = written(run)
    assert parsed.open == []
    lines = chart_lines(page)
    assert list(lines) == TITLES
    assert [len(lines[title]) for title in TITLES] == [1, 1, 1, 3, 3, 3]
    for title, told in zip(TITLES, ("0.001", "2", "0.0015", "2", "0.25", "2")):
        assert f"{title} {told}0 to " in parsed.text
    rate = np.array(lines["learning rate"][0])
    heights = (78 - rate[:, 1]) / 70
    np.testing.assert_allclose(rate[:, 0] / 270 * 399 / 400, heights, atol=0.02)
    last = [line[-1][1] for line in lines["expert load"]]
    np.testing.assert_allclose([(78 - y) / (78 - last[2]) for y in last], [1 / 3, 2 / 3, 1], atol=0.01)


def test_a_jump_of_a_single_step_is_on_the_chart_however_long_the_run(tmp_path: Path) -> None:
    write_health(run := write_run(tmp_path / "run"), steps=9001, layers=1)
    points = np.array(chart_lines(written(run)[0])["gradient norm"][0])
    assert len(points) <= 160
    jump = points[points[:, 1].argmin()]
    assert jump[1] == 8
    assert jump[0] == pytest.approx(135, abs=270 / 160)
    assert (points[:, 1] > 50).sum() == len(points) - 1


def test_a_trouble_is_marked_in_every_chart_and_told_and_its_text_stays_text(tmp_path: Path) -> None:
    write_health(run := write_run(tmp_path / "run"), steps=73, layers=1)
    page, parsed = written(run)
    told = "At step 37, the loss is nan: the run went back to step 30 and left out the windows 296 to 303."
    assert told in parsed.text
    assert "At step 5, </script><script>alert(1)" in parsed.text
    assert "<script>alert" not in page
    assert parsed.open == []
    marks = [attributes for tag, attributes in parsed.tags if tag == "line" and attributes.get("class") == "trouble"]
    assert len(marks) == 2 * (2 + len(TITLES))
    assert sum(attributes["x1"] == "135.0" for attributes in marks) == len(TITLES)
    root = ElementTree.parse(write_loss_svg(run, 29)).getroot()
    assert [line.get("x1") for line in root.findall("{*}line") if line.get("class") == "trouble"] == ["439.0", "86.1"]


def test_without_trouble_and_health_there_is_no_word_of_them(tmp_path: Path) -> None:
    page, parsed = written(write_run(tmp_path / "run"))
    assert list(chart_lines(page)) == ["learning rate", "gradient norm"]
    assert "trouble" not in parsed.text.replace("jumps announce trouble", "")
    _, parsed = written(tmp_path)
    assert "How it fared" not in parsed.text


def test_a_long_run_and_a_large_model_still_give_a_small_page(tmp_path: Path) -> None:
    write_health(run := write_run(tmp_path / "run"), steps=10_000, layers=40)
    (run / "samples.jsonl").write_text(
        "".join(json.dumps({"step": i, "prompt": "to", "text": "x" * 9_000}) + "\n" for i in range(500))
    )
    _, tokenizer = model_and_tokenizer()
    model = Decoder(
        DecoderConfig(tokenizer.vocab_size, d_model=32, n_layers=40, n_heads=32, d_head=2, context_length=64)
    )
    assert write_report(run, model.eval(), tokenizer, TEXT).stat().st_size < 1_000_000


def test_loss_svg_is_a_picture_of_its_own(tmp_path: Path) -> None:
    path = write_loss_svg(write_run(tmp_path / "run"), 29)
    assert path is not None
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall("{*}circle")) == 4
    assert "ln 29 = 3.37" in "".join(root.itertext())


def test_sampling_a_curve_keeps_its_ends_and_its_beginning() -> None:
    places = sample(100_000)
    assert places[0] == 0
    assert places[-1] == 99_999
    assert places[:5] == [0, 1, 2, 3, 4]
    assert len(places) <= 600


def test_smoothing_keeps_a_straight_line_and_the_mean_of_noise() -> None:
    line = [3 - i / 1000 for i in range(1000)]
    np.testing.assert_allclose(smoothed(line)[:980], line[:980], atol=1e-9)
    noise = np.random.default_rng(0).normal(size=5000).tolist()
    assert np.std(smoothed(noise)[500:]) < 0.15 * np.std(noise)
