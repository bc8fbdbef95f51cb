"""Writes report.html: all records of a run or a model on one self-contained page."""

import platform
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from onward.base.errors import UserError
from onward.base.fields import counted, decimal, import_options
from onward.base.fields import text as in_text
from onward.base.files import atomic_write
from onward.config.decoder import DecoderConfig
from onward.model.decoder import Decoder
from onward.planning.descriptions import describe, describe_parts
from onward.planning.releases import find
from onward.reports.pictures.diagram import block
from onward.reports.pictures.markup import details, embedded, page_of, resource, table, visible
from onward.reports.pictures.picture import PANEL_STYLE
from onward.reports.pictures.plot import COLORS, STYLE, short
from onward.reports.runs.charts import charts
from onward.reports.runs.curve import loss_figure
from onward.reports.runs.look import look
from onward.reports.runs.metrics import Metrics, sample
from onward.reports.runs.record import Figures, RunRecord, options_in_effect
from onward.reports.runs.report_card import PUBLISHED, SCORES, computation, report_card
from onward.reports.runs.wording import duration, source_line
from onward.text.tokenizer import Tokenizer

SAMPLES, SAMPLE_LENGTH = 60, 4_000  # largest number of samples, and of characters of a prompt or completion
ROLLBACKS = 50  # largest number of rollbacks listed
COUNTS = "documents", "tokens", "bytes"  # columns of the table of sources
LOSS = (
    "The loss is the mean negative log-probability of the next token. It falls quickly while frequent tokens are "
    "learned, then slowly."
)


def write_report(
    page: Path,
    record: RunRecord,
    model: Decoder,
    tokenizer: Tokenizer | None,
    text: str,
    other: RunRecord | None = None,
) -> Figures:
    """Write the page of a run or a model, on which the model reads the first sentences of `text`; curves of `other` are
    drawn over those of `record`. Sections without records are left out."""
    metrics, samples, vocab_size = record.metrics, record.samples, model.config.vocab_size
    figures = replace(record.figures(), parameters=sum(p.numel() for p in model.parameters()))
    others = (None, "") if other is None else (other.metrics, other.folder.name)
    diagram = block(model.config)
    seen, pictures = look(model, tokenizer, text)
    parts = {
        "title": visible(record.folder.resolve().name),
        "style": COLORS + STYLE + PANEL_STYLE + resource("report.css"),
        **head(record, figures, model.config, tokenizer),
        "comparison": comparison(record, figures, model.config, other) if other else "",
        "curve": loss_figure(metrics, record.guesses(vocab_size), *others) if metrics.steps else "",
        "card": card_section(record, model.config, tokenizer),
        "loss_about": LOSS if record.method == "sft" else visible(f"The loss is that of the method {record.method}."),
        "rollbacks": rollbacks(metrics),
        "charts": charts(metrics, *others),
        "samples": "".join(sample_article(samples[i]) for i in sample(len(samples), SAMPLES)),
        "tables": tables(record, model.config),
        "diagram": diagram.svg(alone=False),
        "diagram_about": visible(diagram.caption),
        **seen,
        "data": embedded([panel for picture in (diagram, *pictures) for panel in picture.values()["panels"]]),
        "script": resource("pictures/sampling.js") + resource("pictures/picture.js") + resource("runs/report.js"),
    }
    with atomic_write(page) as new:
        new.write_text(page_of("runs/report.html", parts), encoding="utf-8")
    return figures


def head(record: RunRecord, figures: Figures, config: DecoderConfig, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Lead, notice, tiles of figures, a sentence on two losses that differ, and facts."""
    f, last = figures, record.metrics.validations[-1:]
    extent = "a part of" if record.options.get("evaluation_tokens") else "the whole"
    on = f"on {extent} validation text" if "loss" in record.result else f"at step {last[0]['step']:,}" if last else ""
    tiles: list[tuple[str, str, str]] = []
    if f.validation_loss is not None:
        unit = "nats per token" if record.method == "sft" else visible(record.method)
        tiles.append(("validation loss", f"{f.validation_loss:.4f}", f"{unit}, {on}"))
    if f.perplexity is not None:
        choice = "as uncertain as a uniform choice among this many tokens"
        tiles.append(("perplexity", decimal(f.perplexity, 2), choice))
    if f.bits_per_byte is not None:
        tiles.append(("bits per byte", f"{f.bits_per_byte:.4f}", "of text; uncompressed text takes 8"))
    if f.tokens:
        tiles.append(("tokens seen", short(f.tokens), f"in {counted(f.step, 'step')}"))
    if f.tokens_per_second:
        tiles.append(("tokens per second", f"{f.tokens_per_second:,.0f}", "in training"))
    planned = f" of {f.steps:,}" if f.steps else ""
    notices = {
        "running": f"This run is in progress: the page shows it at step {f.step:,}{planned}.",
        "stopped": f"This run stopped at step {f.step:,}{planned}. "
        f"To go on: onward train --resume {quote(str(record.folder))}{import_options(record.modules)}",
    }
    options, vocabulary = record.options, "none" if tokenizer is None else f"{tokenizer.vocab_size:,} tokens"
    facts = {
        **dict(describe_parts(config)),
        "tokenizer": ", ".join([*([options["tokenizer"]] if options.get("tokenizer") else []), vocabulary]),
        "text": source_line(record.data.get("sources") or options.get("sources")),
        "examples": "; ".join(record.notes),
        "quantized base": record.quantization,
        "computation": computation(record, config),
        "written": record.when,
        "this page": f"made {date.today().isoformat()} with PyTorch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}",
    }
    return {
        "lead": f"A decoder of {f.parameters:,} parameters"
        + (f", trained for {duration(f.seconds)}." if f.seconds else "."),
        "notice": visible(notices.get(f.state, "")),
        "tiles": "".join(
            f"<div><span>{name}</span><b>{value}</b><small>{note}</small></div>" for name, value, note in tiles
        ),
        "why": visible(why_they_differ(record)),
        "facts": "".join(f"<dt>{name}</dt><dd>{visible(str(value))}</dd>" for name, value in facts.items() if value),
    }


def card_section(record: RunRecord, config: DecoderConfig, tokenizer: Tokenizer | None) -> str:
    card = report_card(record, config, tokenizer)
    items = lambda texts: "".join(f"<li>{visible(text)}</li>" for text in texts)
    parts = []
    if card.scores:
        parts.append(f"<h3>Tasks, with standard errors</h3>{table(card.scores, SCORES)}")
    if card.published:
        about = "<p>Measured in the same way; bits per byte were measured on another text.</p>"
        rows = f"{table(card.published, PUBLISHED)}<ul>{items(card.sources)}</ul>"
        parts.append(f"<h3>Published figures of the models nearest in size</h3>{about}{rows}")
    if card.limits:
        parts.append(f"<h3>Limitations</h3><ul>{items(card.limits)}</ul>")
    return "".join(f'<div class="quiet scores">{part}</div>' for part in parts)


def why_they_differ(record: RunRecord) -> str:
    """Explain why the last point of the validation curve is not the final validation loss."""
    final = record.result
    for last in record.metrics.validations[-1:] if "loss" in final else ():
        if f"{last['validation_loss']:.4f}" != f"{final['loss']:.4f}":
            return (
                f"The last point of the validation curve, {last['validation_loss']:.4f} at step {last['step']:,}, is "
                f"measured during training on a sample of {last.get('tokens', 0):,} tokens in "
                f"{record.options.get('precision', 'the precision of training')}; the final validation loss, "
                f"{final['loss']:.4f}, on {final.get('tokens', 0):,} tokens in fp32."
            )
    return ""


def comparison(record: RunRecord, figures: Figures, config: DecoderConfig, other: RunRecord) -> str:
    """Figures of two runs side by side, and the options and parts that differ."""
    if not other.metrics.steps:
        raise UserError(f"Cannot compare with {other.folder}, which has no steps on record: name the folder of a run")
    theirs = find(f"{other.folder}/")[1]
    both = [figures, other.figures()]
    shown: dict[str, list[Any]] = {
        "validation loss": [f.validation_loss and f"{f.validation_loss:.4f}" for f in both],
        "bits per byte": [f.bits_per_byte and f"{f.bits_per_byte:.4f}" for f in both],
        "parameters": [f.parameters and f"{f.parameters:,}" for f in both],
        "steps made": [f"{f.step:,}" for f in both],
        "tokens seen": [short(f.tokens) for f in both],
        "training time": [f.seconds and duration(f.seconds) for f in both],
    }
    rows = [(name, *(value or "–" for value in values)) for name, values in shown.items()]
    settings = [
        dict(describe_parts(c)) | {name: value for name, value, _ in options_in_effect(one.options, c)}
        for one, c in ((record, config), (other, theirs))
    ]
    names = dict.fromkeys([*settings[0], *settings[1]])
    pairs = [(name, *(of_run.get(name, "–") for of_run in settings)) for name in names if name != "out"]
    rows += [row for row in pairs if row[1] != row[2]]
    note = (
        ""
        if config.vocab_size == theirs.vocab_size
        else (
            '<p class="notice">The vocabularies differ, so losses per token cannot be compared; bits per byte can.</p>'
        )
    )
    return note + table(rows, ["", record.folder.resolve().name, other.folder.resolve().name])


def tables(record: RunRecord, config: DecoderConfig) -> str:
    facts = [(fact.what, in_text(fact.value), fact.meaning) for fact in describe(config)]
    return (
        details("The options of the run, with the values in effect", options_in_effect(record.options, config))
        + details("The model", facts)
        + details("The data", data_rows(record.data), ["source", *COUNTS])
        + details("The final evaluation", [(name, in_text(value)) for name, value in record.result.items()])
    )


def data_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """(name, documents, tokens, bytes) for each source in data.json, then the documents that each filter dropped."""
    sources, report = data.get("sources"), data.get("report")
    named = [one for one in sources if isinstance(one, Mapping)] if isinstance(sources, list) else []
    rows = [[str(one.get("name", "?")), *(source_line(one.get(name)) for name in COUNTS)] for one in named]
    dropped = report.get("dropped") if isinstance(report, Mapping) else None
    if isinstance(dropped, Mapping):
        rows += [[f"dropped: {why}", source_line(count), "", ""] for why, count in dropped.items()]
    return rows


def rollbacks(metrics: Metrics) -> str:
    items = ""
    for row in metrics.rollbacks[:ROLLBACKS]:
        sentence = f"Step {row['failed_step']:,} failed ({row['reason']}): the run went back to step {row['step']}"
        if isinstance(skipped := row.get("skipped"), list) and [type(number) for number in skipped] == [int, int]:
            sentence += f" and left out the windows {skipped[0]:,} to {skipped[1] - 1:,}"
        items += f"<li>{visible(sentence)}.</li>"
    return f'<ul class="quiet">{items}</ul>' if items else ""


def sample_article(row: Mapping[str, Any]) -> str:
    prompt, text = (visible(str(row.get(key, ""))[:SAMPLE_LENGTH]) for key in ("prompt", "text"))
    step = visible(str(row.get("step", "?")))
    step += f", reward {row['reward']:.3g}" if isinstance(row.get("reward"), float) else ""
    terms = row["rewards"] if isinstance(row.get("rewards"), Mapping) else {}
    step += "".join(f", {visible(str(name))} {term:.3g}" for name, term in terms.items() if isinstance(term, float))
    at = row["step"] if isinstance(row.get("step"), int) else ""  # where the loss curve is marked
    sample = f'<p class="text" dir="auto"><span class="prompt">{prompt}</span>{text}</p>'
    return f'<article data-step="{at}"><h3>step {step}</h3>{sample}</article>'
