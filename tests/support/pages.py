"""Run folders with synthetic content, and pages parsed with the standard library's parser."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

from onward import Decoder, DecoderConfig, Tokenizer, train_tokenizer
from onward.reports import RunRecord
from onward.reports.runs.report import write_report

HOSTILE = "</script><script>alert(1)</script><!--name--><img src=x onerror=alert(1)>\x00\x1b[31m\u202e\ud800&amp;\"'"
TEXT = "to be, or\n\tnot to be: that is the question"
VOID = {"meta", "input", "rect", "circle", "line", "path", "img", "link", "br"}


class Page(HTMLParser):
    """A parsed page: the tags still open at its end, its scripts by id or type, all tags with attributes, and its
    text."""

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


def model_and_tokenizer(extra: str = "", **fields: Any) -> tuple[Decoder, Tokenizer]:
    """A random character model with 2 layers and 4 heads, and `extra` as an additional token; `fields` are fields of
    its config."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer("char", [TEXT, extra])
    tokenizer.inner.add_tokens([extra] if extra else [])
    tokenizer = Tokenizer(tokenizer.inner)
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 4, "context_length": 64}
    model = Decoder(DecoderConfig(tokenizer.vocab_size, **sizes | fields))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model.eval(), tokenizer


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_run(run: Path, steps: int = 40) -> Path:
    """Write the files of a run that made `steps` of its 40 planned steps, and is finished if it made all of them."""
    (run / "data").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        numbers = {"loss": 3.4 - step / 100, "learning_rate": step / 1e4, "grad_norm": 1.0}
        rows.append({"step": step, **numbers, "tokens": 512, "seconds": 0.25})
        if step % 10 == 0:
            rows.append({"step": step, "validation_loss": 3.5 - step / 100, "tokens": 99})
    write_lines(run / "metrics.jsonl", rows)
    write_lines(
        run / "samples.jsonl", [{"step": step, "prompt": "to be", "text": f" sample {step}"} for step in (0, 20, 40)]
    )
    options = {"steps": 40, "sources": ["play.txt"], "tokenizer": "char", "model": {"n_layers": 2}, "precision": "bf16"}
    (run / "run.json").write_text(json.dumps(options))
    source = {"name": "play", "version": "Q2", "sha256": "0123456789ab" + "c" * 52, "shards": [{"file": "00000.bin"}]}
    (run / "data/data.json").write_text(json.dumps({"documents": 1, "sources": [source]}))
    final = {"loss": 2.75, "perplexity": 15.6, "bits_per_byte": 1.875, "tokens": 99, "bytes": 99, "seconds": 133}
    if steps == 40:
        (run / "result.json").write_text(json.dumps(final))
    return run


def written(run: Path, text: str = TEXT, extra: str = "", other: Path | None = None) -> tuple[str, Page]:
    """Write the page of a run folder with the random model; return its text, also parsed."""
    model, tokenizer = model_and_tokenizer(extra)
    write_report(run / "report.html", RunRecord(run), model, tokenizer, text, RunRecord(other) if other else None)
    page = (run / "report.html").read_text(encoding="utf-8")
    return page, Page(page)


def plots(page: str) -> dict[str, dict[str, Any]]:
    """The data of each plot on a page: the loss curve as "loss", the other plots by title."""
    found = {}
    figures = r'<figure class="(?:curve|chart)">(?:<h3>([a-z ]+) <b>)?.*?<script type="application/json">(.*?)</script>'
    for title, data in re.findall(figures, page, re.DOTALL):
        found[title or "loss"] = json.loads(data)
    return found


def paths(page: str, title: str = "") -> list[list[tuple[float, float]]]:
    """The points of each line in the plot with this title; "": in the loss curve."""
    start = page.index(f"<h3>{title} <b>" if title else '<figure class="curve">')
    svg = page[start : page.index("</svg>", start)]
    lines = re.findall(r'<path class="(?!rollback|dots)[^"]*" [^>]*d="M([^"VZ]*)', svg)
    return [[(float(x), float(y)) for x, y in (point.split() for point in d.split("L"))] for d in lines]
