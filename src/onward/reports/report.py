"""report.html: what a run has learned, on one page that needs nothing else.

Shapes: H heads, T tokens.
"""

import base64
import html
import json
import math
import platform
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.errors import UserError
from onward.evaluation.score import logprobs
from onward.files import read_json, written_whole
from onward.inspection.attention import attends, attention_maps, next_tokens
from onward.model.decoder import Decoder
from onward.reports.charts import charts
from onward.reports.curve import COLORS, STYLE, Metrics, loss_svg, numbers, read_lines, read_metrics, sample
from onward.text.tokenizer import Tokenizer

PLACES = 32  # the most tokens of the text that are looked at
CELLS = 300_000  # the most attention weights on the page
SAMPLES, SAMPLE_LENGTH = 60, 4_000  # the most samples, and characters of each
TROUBLES = 50  # the most steps that went wrong
UNTOLD = "shards", "unknown_characters", "files", "size", "listing", "fingerprint"  # of a source
MARKS = {" ": "·", "\n": "↵", "\t": "⇥"}  # white space in a token
KEPT = {"\n": "\n", "\t": "\t"}  # control characters that belong to a text


def write_report(run: Path, model: Decoder, tokenizer: Tokenizer, text: str = "") -> Path:
    """Write report.html into a run folder from what is there of metrics.jsonl, samples.jsonl, run.json,
    data/data.json and result.json, and from the model's look at the beginning of `text`.

    By default `text` is the last sample. What a run that was stopped early lacks is left out.
    """
    metrics, samples = read_metrics(run), read_lines(run / "samples.jsonl")
    configuration, data, result = (table(run / name) for name in ("run.json", "data/data.json", "result.json"))
    data.pop("made", None)  # how it was asked for
    if not text and samples:
        text = "".join(str(samples[-1].get(key, "")) for key in ("prompt", "text"))
    parts = {
        "name": visible(run.resolve().name),
        "style": COLORS + STYLE,
        **head(model, tokenizer, configuration, data, result, metrics),
        "curve": curves(metrics, model.config.vocab_size) if metrics.steps else "",
        "troubles": troubles(metrics),
        "charts": charts(metrics),
        "samples": "".join(sample_article(samples[i]) for i in sample(len(samples), SAMPLES)),
        "tables": "".join(
            details(title, value)
            for title, value in (("The run", configuration), ("The data", data), ("The final evaluation", result))
            if value
        ),
        **look(model, tokenizer, text),
    }
    template = files("onward.reports").joinpath("report.html").read_text(encoding="utf-8")
    template = re.sub(r"<!--if (\w+)-->(.*?)<!--end-->", lambda m: m[2] if parts[m[1]] else "", template, flags=re.S)
    page = re.sub(r"<!--(\w+)-->", lambda m: parts[m[1]], template)
    with written_whole(run / "report.html") as new:
        new.write_text(page, encoding="utf-8")
    return run / "report.html"


def table(path: Path) -> dict[str, Any]:
    """The table in a JSON file, empty if there is none to be read."""
    try:
        return read_json(path)
    except UserError:
        return {}


def readable(text: str, marks: Mapping[str, str]) -> str:
    """Text with `marks` for some characters, and control characters and stray surrogates written out."""
    hidden = lambda c: unicodedata.category(c) in ("Cc", "Cs")
    return "".join(marks.get(c) or (c.encode("unicode_escape").decode() if hidden(c) else c) for c in text)


def visible(text: str, marks: Mapping[str, str] = KEPT) -> str:
    """The same for HTML."""
    return html.escape(readable(text, marks))


def head(
    model: Decoder,
    tokenizer: Tokenizer,
    configuration: Mapping[str, Any],
    data: Mapping[str, Any],
    result: Mapping[str, Any],
    metrics: Metrics,
) -> dict[str, str]:
    """What the page begins with: lead, notice, tiles and facts."""
    c, steps, final = model.config, metrics.steps, numbers(result)
    done, planned = int(steps[-1]["step"]) if steps else 0, int(numbers(configuration).get("steps", 0))
    tokens, spent = (sum(row.get(key, 0) for row in steps) for key in ("tokens", "seconds"))
    took = final.get("seconds") or spent
    corpus = words(data.get("sources") or configuration.get("sources") or "text that is not on record")

    loss, where = final.get("loss"), "on text held out"
    if loss is None and metrics.validations:
        last = metrics.validations[-1]
        loss, where = last["validation_loss"], f"at step {last['step']:,}"
    tiles: list[tuple[str, str, str]] = []
    if loss is not None:
        tiles += [
            ("validation loss", f"{loss:.4f}", f"nats per token, {where}"),
            ("perplexity", f"{math.exp(min(loss, 700)):,.2f}", "as unsure as between so many tokens"),
        ]
    if "bits_per_byte" in final:
        tiles.append(("bits per byte", f"{final['bits_per_byte']:.4f}", "the text itself has 8"))
    if tokens:
        count = f"{tokens / 1e6:,.2f} M" if tokens >= 1e6 else f"{tokens:,}"
        tiles.append(("tokens seen", count, f"in {done:,} steps"))
    if tokens and spent:
        tiles.append(("tokens per second", f"{tokens / spent:,.0f}", "in training"))

    shared = f" ({c.n_kv_heads} for keys and values)" if c.n_kv_heads != c.n_heads else ""
    facts = {
        "Model": f"{c.n_layers} layers, width {c.d_model}, {c.n_heads} heads{shared}, feed-forward {c.d_ff}, "
        f"context {c.context_length:,} tokens",
        "Tokenizer": f"{configuration.get('tokenizer') or 'its own'}, {tokenizer.vocab_size:,} tokens",
        "Corpus": corpus,
        "Machine": f"{torch.get_num_threads()} threads, {platform.machine()}",
        "Software": f"PyTorch {torch.__version__}, Python {platform.python_version()}",
        "Date": date.today().isoformat(),
    }
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "lead": f"A decoder of {parameters:,} parameters" + (f", trained for {duration(took)}." if took else "."),
        "notice": f"This run stopped at step {done:,} of {planned:,}: it can be resumed." if done < planned else "",
        "tiles": "".join(
            f"<div><span>{name}</span><b>{value}</b><small>{note}</small></div>" for name, value, note in tiles
        ),
        "facts": "".join(f"<dt>{name}</dt><dd>{visible(value)}</dd>" for name, value in facts.items()),
    }


def duration(seconds: float) -> str:
    """Seconds as one says them: 2 min 13 s."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.3g} s"


def words(value: Any) -> str:
    """A plain value as a line of text, hashes shortened."""
    if isinstance(value, Mapping):
        told = {key: words(item) for key, item in value.items() if key not in UNTOLD}
        return ", ".join(item if key == "name" else f"{key} {item}" for key, item in told.items())
    if isinstance(value, list):
        return "; ".join(words(item) for item in value[:5]) + (f"; and {len(value) - 5} more" if len(value) > 5 else "")
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1…", str(value))


def details(title: str, value: Mapping[str, Any]) -> str:
    """A table that unfolds, of everything in a table of plain values (the first 200 entries)."""
    rows = (f"<tr><th>{visible(name)}</th><td>{visible(str(item))}</td></tr>" for name, item in leaves(value))
    return f"<details><summary>{title}</summary><table>{''.join(islice(rows, 200))}</table></details>"


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values inside tables and lists, with their dotted names."""
    if isinstance(value, Mapping | list) and value:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def curves(metrics: Metrics, vocab_size: int) -> str:
    """The loss curve over linear and over logarithmic steps, each with what a pointer reads off it."""
    result = ""
    for kind in "linear", "log":
        svg, rows = loss_svg(metrics, vocab_size, log=kind == "log")
        readings = f'<p class="readout js"></p><script type="application/json">{embedded(rows)}</script>'
        result += f'<figure class="curve {kind}">{svg}{readings}</figure>'
    return result


def troubles(metrics: Metrics) -> str:
    """What went wrong, at which step, and what was done."""
    items = ""
    for row in metrics.troubles[:TROUBLES]:
        told = f"At step {row['failed_step']:,}, {row['reason']}: the run went back to step {row['step']}"
        if isinstance(left := row.get("skipped"), list) and [type(number) for number in left] == [int, int]:
            told += f" and left out the windows {left[0]:,} to {left[1] - 1:,}"
        items += f"<li>{visible(told)}.</li>"
    return f'<ul class="quiet">{items}</ul>' if items else ""


def embedded(value: Any) -> str:
    """JSON for a script element, which nothing inside can end."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def sample_article(row: Mapping[str, Any]) -> str:
    """One sample: the prompt, and how the model went on."""
    prompt, text = (visible(str(row.get(key, ""))[:SAMPLE_LENGTH]) for key in ("prompt", "text"))
    step = visible(str(row.get("step", "?")))
    whole = f'<p class="text" dir="auto"><span class="prompt">{prompt}</span>{text}</p>'
    return f"<article><h3>step {step}</h3>{whole}</article>"


def look(model: Decoder, tokenizer: Tokenizer, text: str) -> dict[str, str]:
    """The attention maps and the next-token tables for the beginning of a text; nothing for fewer than two tokens."""
    tokens = tokenizer.encode(text[: 64 * PLACES])
    if tokenizer.bos_id is not None and tokens[:1] != [tokenizer.bos_id]:
        tokens = [tokenizer.bos_id, *tokens]
    c = model.config
    places = min(len(tokens), PLACES, c.context_length, max(2, math.isqrt(CELLS // (c.n_layers * c.n_heads))))
    if places < 2:
        return dict.fromkeys(("attention", "sinks", "words", "next"), "")
    tokens = tokens[: places + 1]
    likely = [0.0, *np.exp(logprobs(model, np.array([tokens]))[0])]  # of each token, given those before
    seen, pieces = tokens[:places], [tokenizer.piece(token) for token in tokens]
    attention = {
        "pieces": [readable(piece, MARKS) for piece in pieces[:places]],
        "heads": c.n_heads,
        "layers": [packed(weights) for weights in attention_maps(model, seen)],
    }
    sinks = any(attend.sinks is not None for attend in attends(model))
    articles = []
    for i, candidates in enumerate(next_tokens(model, seen)):
        behind = "".join(pieces[max(0, i - 7) : i + 1])
        rows = [(tokenizer.piece(token), p, [token] == tokens[i + 1 : i + 2]) for token, p in candidates]
        if i + 1 < len(tokens) and not any(true for *_, true in rows):
            rows.append((pieces[i + 1], likely[i + 1], True))
        articles.append(next_article(behind, rows))
    return {
        "attention": embedded(attention),
        "sinks": " (to less here, where a sink takes the rest)" if sinks else "",
        "words": "".join(
            f'<button type="button" class="token" style="--p:{100 * p:.0f}%">{visible(piece, MARKS)}</button>'
            for piece, p in zip(pieces[:places], likely)
        ),
        "next": "".join(articles),
    }


def packed(weights: Tensor) -> str:
    """Attention weights (H, T, T) as a byte each, 255 for all, in base64."""
    return base64.b64encode((weights.float() * 255).round().byte().cpu().numpy().tobytes()).decode()


def next_article(behind: str, rows: Sequence[tuple[str, float, bool]]) -> str:
    """The tokens (as read, probability, whether it is the true one) that may follow a text."""
    items = ""
    for piece, p, true in rows:
        share = f"{p:.1%}".replace("%", " %") if p >= 0.001 else f"1 in {1 / max(p, 1e-9):,.0f}"
        items += (
            f'<li{" class=true" if true else ""}><span class="token">{visible(piece, MARKS)}</span>'
            f'<span><i style="width:{p:.1%}"></i></span><span>{share}</span></li>'
        )
    return f"<article><h3>after “<bdi>{visible(behind.strip())}</bdi>”</h3><ol>{items}</ol></article>"
