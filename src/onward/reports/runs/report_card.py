"""The report card of a run: its data, size, cost and loss, its scores compared with published figures, and its
limits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onward.base.fields import decimal
from onward.config.decoder import DecoderConfig
from onward.planning.flops import training_flops
from onward.reports.pictures.plot import short
from onward.reports.runs.published import PublishedResult, nearest
from onward.reports.runs.record import Figures, RunRecord
from onward.reports.runs.scores import TaskScore
from onward.reports.runs.wording import duration, source_line
from onward.text.tokenizer import Tokenizer

SAMPLES, LENGTH = 2, 400  # samples on the card, and characters of each
SCORES = "task", "score", "guessing", "examples", "questions", "measured by"
PUBLISHED = "model", "parameters", "task", "score"


@dataclass(frozen=True)
class ReportCard:
    """The report card of a run as rows and sentences."""

    facts: Sequence[tuple[str, str]] = ()  # name and value
    scores: Sequence[tuple[str, ...]] = ()  # rows with the columns SCORES
    published: Sequence[tuple[str, ...]] = ()  # rows with the columns PUBLISHED
    sources: Sequence[str] = ()  # sources of the published figures
    samples: Sequence[tuple[str, str]] = ()  # prompts and their continuations
    limits: Sequence[str] = ()


def report_card(record: RunRecord, config: DecoderConfig, tokenizer: Tokenizer | None) -> ReportCard:
    """The report card of a run; empty for a model without a run."""
    if not record.options:
        return ReportCard()
    figures = record.figures()
    others = published(figures, record.scores)
    return ReportCard(
        [(name, value) for name, value in facts(record, figures, config) if value],
        [score_row(score) for score in record.scores],
        [published_row(one) for one in others],
        list(dict.fromkeys(one.source for one in others)),
        [(str(row.get("prompt", "")), str(row.get("text", ""))[:LENGTH]) for row in samples(record)],
        list(limits(record, figures, config, tokenizer)),
    )


def facts(record: RunRecord, figures: Figures, config: DecoderConfig) -> Iterator[tuple[str, str]]:
    f, sources = figures, record.data.get("sources") or record.options.get("sources")
    yield "data", source_line(sources)
    layers = f"{config.n_layers} layers of width {config.d_model:,}, context of {config.context_length:,} tokens"
    yield "size", f"{f.parameters:,} parameters, {layers}" if f.parameters else layers
    yield "trained on", f"{f.tokens:,} tokens in {f.step:,} steps" if f.tokens else ""
    yield "computation", computation(record, config)
    speed = f", {f.tokens_per_second:,.0f} tokens per second" if f.tokens_per_second else ""
    yield "time", f"{duration(f.seconds)}{speed}" if f.seconds else ""
    if f.validation_loss is not None:
        unit = "nats per token" if record.method == "sft" else record.method
        yield "validation loss", f"{f.validation_loss:.4f} {unit}"
    yield "perplexity", "" if f.perplexity is None else decimal(f.perplexity, 2)
    yield "bits per byte", "" if f.bits_per_byte is None else f"{f.bits_per_byte:.4f}"


def computation(record: RunRecord, config: DecoderConfig) -> str:
    """Operations of a pre-training run; "" for other runs."""
    tokens = record.figures().tokens
    if not tokens or "method" in record.options:
        return ""
    return f"{tokens * training_flops(config, config.context_length):.3g} FLOPs".replace("e+", "e")


def score_row(score: TaskScore) -> tuple[str, ...]:
    error = "" if score.error is None else f" ± {score.error:.3f}"
    chance = "" if score.chance is None else f"{score.chance:.3f}"
    metric = "" if score.metric == "acc" else f", {score.metric}"
    questions = "" if score.questions is None else f"{score.questions:,}"
    return score.task, f"{score.score:.3f}{error}", chance, f"{score.examples}", questions, f"{score.suite}{metric}"


def published(figures: Figures, scores: Sequence[TaskScore]) -> list[PublishedResult]:
    """Results of the models nearest in size on the same tasks and, for bits per byte, on enwik8."""
    if not figures.parameters:
        return []
    wanted = [(one.suite, one.task, one.metric, one.examples) for one in scores]
    if figures.bits_per_byte is not None:
        wanted.append(("a text", "enwik8", "bits per byte", 0))
    return [figure for one in wanted for figure in nearest(figures.parameters, *one)]


def published_row(figure: PublishedResult) -> tuple[str, ...]:
    score = f"{figure.score:.3f}" if figure.suite != "a text" else f"{figure.score:.2f} {figure.metric}"
    return figure.model, short(figure.parameters), figure.task, score


def samples(record: RunRecord) -> list[dict[str, object]]:
    return record.samples[-SAMPLES:]


def limits(record: RunRecord, figures: Figures, config: DecoderConfig, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Sentences on the limits of the model, as far as the records show them."""
    guessed = [score.task for score in record.scores if score.shown is False]
    if guessed:
        yield f"Its scores are not above guessing by two standard errors on: {'; '.join(guessed)}."
    if not record.scores:
        yield "No task has been evaluated: onward evaluate stores the scores of a run for this card."
    yield (
        f"It reads at most {config.context_length:,} tokens and ignores earlier text. It knows only its training "
        "text, and its output may be false."
    )
    if tokenizer is not None and not tokenizer.templates:
        yield "It continues texts. It has no chat template, and was not trained to follow instructions."
    if tokenizer is not None and tokenizer.unknown_id is not None:
        yield "Characters that are not in its vocabulary are read as one unknown character."
    last = [row["loss"] for row in record.metrics.steps[-50:]]
    if last and figures.validation_loss is not None and record.method == "sft":
        train = sum(last) / len(last)
        if figures.validation_loss > 1.1 * train:
            yield (
                f"It has memorized some of its training text: the final loss is {train:.2f} on training text and "
                f"{figures.validation_loss:.2f} on held-out text."
            )
