"""Builds a model card, the README.md of a model on the hub, from the records in the folder of a model or a run."""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from shlex import quote
from typing import Any

from onward.base import fields
from onward.base.errors import UserError
from onward.base.files import atomic_write
from onward.checkpoint.gguf.convert import plan
from onward.checkpoint.huggingface.folder import read_config
from onward.checkpoint.load import load_model, open_source
from onward.hub.folder import is_adapter
from onward.model.decoder import Decoder
from onward.planning.descriptions import describe_parts
from onward.reports.pictures.markup import readable
from onward.reports.runs.command import command, public
from onward.reports.runs.metrics import sample
from onward.reports.runs.record import RunRecord
from onward.reports.runs.report import COUNTS, data_rows
from onward.reports.runs.report_card import PUBLISHED, SCORES, ReportCard, report_card
from onward.reports.runs.wording import duration
from onward.text.tokenizer import Tokenizer

ROWS = 12  # largest number of validations in the table of losses
CURVE = "loss.svg"  # file name of the loss curve in a run folder
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def model_card(folder: Path, license: str, name: str = "") -> str:
    """The README.md of the model in a folder, with metadata for the hub; `name` is its name there. Properties without a
    record are left out. Raises a UserError for an adapter, or if `license` is not an identifier."""
    if not LICENSE.fullmatch(license):
        given = f"license is {license!r}" if license else "the model needs a license"
        raise UserError(f"{given}: give --license apache-2.0, mit, cc-by-4.0 or another identifier that the hub lists")
    if is_adapter(folder):
        raise UserError(
            f"Cannot describe {folder}, which is an adapter: merge it into its base with onward merge, and "
            "publish the result"
        )
    name = name or folder.resolve().name
    record, model_type = RunRecord(folder), str(read_config(folder).get("model_type", ""))
    model, tokenizer = load_model(folder)[0], open_source(folder).tokenizer()
    base = str(record.options.get("base") or "")
    card = report_card(record, model.config, tokenizer)
    parts = [
        properties(license, model_type, base, record, name.rpartition("/")[2]),
        f"# {name.rpartition('/')[2]}\n\n{lead(record, model, model_type)}",
        "## The model\n\n" + table(("part", "value"), described(record, model, tokenizer)),
        "## How to use it\n\n" + usage(name, model_type, model, tokenizer),
        *training(record),
        *tasks(card),
    ]
    return "\n\n".join(parts) + "\n"


def write_report_card(folder: Path, model: Decoder, tokenizer: Tokenizer | None) -> None:
    """Write card.md into the folder of a run; nothing for a model without a run."""
    card = report_card(RunRecord(folder), model.config, tokenizer)
    if not card.facts:
        return
    parts = [f"# The report card of {folder.resolve().name}", table(("", ""), card.facts), *tasks(card)]
    for prompt, text in card.samples:
        parts.append(f"## A sample\n\n{block('text', (prompt + text).replace('```', chr(39) * 3).splitlines())}")
    with atomic_write(folder / "card.md") as new:
        new.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def tasks(card: ReportCard) -> Iterator[str]:
    if card.scores:
        about = "Scores with standard errors; guessing is the score of random answers."
        yield f"## Tasks\n\n{about}\n\n" + table(SCORES, card.scores)
    if card.published:
        about = "Models nearest in size, measured in the same way; bits per byte were measured on another text."
        yield f"## Published figures\n\n{about}\n\n" + table(PUBLISHED, card.published)
        yield "Sources:\n\n" + "\n".join(f"- {source}" for source in card.sources)
    if card.limits:
        yield "## Limitations\n\n" + "\n".join(f"- {readable(limit, {})}" for limit in card.limits)


def results(record: RunRecord, name: str) -> dict[str, Any]:
    """Recorded figures as keyword arguments of `huggingface_hub.ModelCardData`."""
    from huggingface_hub import EvalResult

    def result(dataset: str, kind: str, value: float, **more: Any) -> EvalResult:
        return EvalResult(
            task_type="text-generation",
            dataset_type=re.sub(r"[^a-z0-9]+", "_", dataset.lower()).strip("_") or "text",
            dataset_name=dataset,
            metric_type=kind,
            metric_value=round(value, 6),
            **more,
        )

    figures = record.figures()
    measured = {"perplexity": figures.perplexity, "bits_per_byte": figures.bits_per_byte}
    results = [result("validation text", kind, value) for kind, value in measured.items() if value is not None]
    for score in record.scores:
        name_of = f"{score.task}, {score.examples} examples" if score.examples else score.task
        error = {} if score.error is None else {"metric_args": {"standard_error": round(score.error, 6)}}
        kind = "accuracy" if score.metric == "acc" else score.metric
        results.append(result(name_of, kind, score.score, metric_name=f"{score.metric} ({score.suite})", **error))
    return {"model_name": name, "eval_results": results} if results else {}


def properties(license: str, model_type: str, base: str, record: RunRecord, name: str) -> str:
    from huggingface_hub import ModelCardData

    sources = record.options.get("sources") or []
    table: dict[str, Any] = {
        "license": license,
        "library_name": "onward" if model_type == "onward" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["onward", model_type],
    }
    if base and not PurePath(base).is_absolute() and not Path(base).exists():  # `base` is a name on the hub
        table["base_model"] = base.partition("@")[0].removeprefix("hf://")
        table["base_model_relation"] = "finetune"
    if published := [str(source).removeprefix("hf://") for source in sources if str(source).startswith("hf://")]:
        table["datasets"] = published
    table |= results(record, name)
    return f"---\n{ModelCardData(**table).to_yaml()}\n---"


def lead(record: RunRecord, model: Decoder, model_type: str) -> str:
    figures, count = record.figures(), sum(p.numel() for p in model.parameters())
    kind = "decoder" if model_type == "onward" else f"decoder of the architecture `{model_type}`"
    trained = f", trained for {duration(figures.seconds)}" if figures.seconds else ""
    again = f" Its training started from `{public(base)}`." if (base := record.options.get("base")) else ""
    return f"A {kind} with {count:,} parameters{trained}, made with Onward.{again}"


def described(record: RunRecord, model: Decoder, tokenizer: Tokenizer | None) -> Iterator[tuple[str, str]]:
    yield from describe_parts(model.config)
    yield "dtype", str(model.dtype).removeprefix("torch.")
    kind = public(record.options.get("tokenizer") or "")
    yield (
        "tokenizer",
        "none" if tokenizer is None else ", ".join(filter(None, [kind, f"{tokenizer.vocab_size:,} tokens"])),
    )
    if tokenizer is not None and tokenizer.templates:
        yield "chat template", ", ".join(tokenizer.templates)


def usage(name: str, model_type: str, model: Decoder, tokenizer: Tokenizer | None) -> str:
    speak = (
        f"onward chat {quote(name)}"
        if tokenizer and tokenizer.templates
        else f'onward generate {quote(name)} "Once upon"'
    )
    texts = [
        block("sh", [speak]),
        block("python", ["import onward", "", f'print(onward.load("{name}").generate("Once upon"))']),
    ]
    if model_type == "onward":
        texts.append("No published architecture expresses this model, so transformers cannot load it.")
    else:
        load = [f'{which}.from_pretrained("{name}")' for which in ("AutoModelForCausalLM", "AutoTokenizer")]
        lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", "", f"model = {load[0]}"]
        texts.append(block("python", [*lines, *([f"tokenizer = {load[1]}"] if tokenizer else [])]))
    try:
        plan(model, tokenizer)
    except UserError as error:
        return "\n\n".join([*texts, f"In llama.cpp: {error}."])
    file = f"{name.rpartition('/')[2]}.gguf"
    convert = [f"onward convert {quote(name)} {quote(file)}", f'llama-cli -m {quote(file)} -p "Once upon"']
    return "\n\n".join([*texts, "In llama.cpp:", block("sh", convert)])


def training(record: RunRecord) -> Iterator[str]:
    if not record.options:
        return
    yield "## How it was trained\n\n" + block("sh", [" ".join(map(quote, command(record.options)))])
    if rows := data_rows(record.data):
        yield "### Data\n\n" + table(("source", *COUNTS), ((public(name), *rest) for name, *rest in rows))
    if validations := record.metrics.validations:
        curve = f"![losses by step]({CURVE})\n\n" if (record.folder / CURVE).exists() else ""
        chosen = [validations[i] for i in sample(len(validations), ROWS)]
        rows = [[fields.text(row.get(name)) for name in ("step", "validation_loss", "bits_per_byte")] for row in chosen]
        yield f"### Curves\n\n{curve}" + table(("step", "validation loss", "bits per byte"), rows)
    if record.result:
        figures = [(key.replace("_", " "), fields.text(value)) for key, value in record.result.items()]
        of = public(str(record.options.get("validation", "")))
        about = f"On the held-out validation text (`--validation {of}`); the loss is in nats per token."
        yield f"## Evaluation\n\n{about}\n\n" + table(("figure", "value"), figures)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[html.escape(readable(cell, {}), quote=False).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *cells])


def block(language: str, lines: Iterable[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])
