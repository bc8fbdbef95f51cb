"""HTML of models, configurations and runs for notebooks: tables of parts and figures, and the loss curve."""

from collections.abc import Iterable
from functools import singledispatch

import torch

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig
from onward.hub.names import size_of
from onward.model.decoder import Decoder
from onward.planning.descriptions import describe_parts
from onward.planning.parameters import active_parameters, cache_bytes_per_token, parameters
from onward.planning.releases import find
from onward.reports.pictures.markup import boxed, visible
from onward.reports.runs.curve import loss_svg
from onward.reports.runs.record import Figures, RunRecord
from onward.reports.runs.wording import duration
from onward.text.tokenizer import Tokenizer
from onward.training.run.run import Run

Rows = list[tuple[str, str]]


def shown(value: object) -> str | None:
    """HTML of an object for a notebook; None if it cannot be described, so that the notebook prints its repr."""
    try:
        return html(value)
    except UserError:
        return None


@singledispatch
def html(value: object) -> str:
    raise NotImplementedError(type(value))


@html.register
def of_config(config: DecoderConfig) -> str:
    count = parameters(config)
    weights = f"{size_of(4 * count)} in fp32, {size_of(2 * count)} in bf16"
    return table("DecoderConfig", [*described(config), ("memory of the weights", weights), cached(config)])


@html.register
def of_decoder(model: Decoder) -> str:
    return table(type(model).__name__, rows_of(model))


def of_model(model: Decoder, tokenizer: Tokenizer | None) -> str | None:
    vocabulary = "none" if tokenizer is None else f"{tokenizer.vocab_size:,} tokens"
    try:
        return table("LanguageModel", [*rows_of(model), ("tokenizer", vocabulary)])
    except UserError:
        return None


@html.register
def of_figures(figures: Figures) -> str:
    steps = f" of {figures.steps:,}" if figures.steps else ""
    values = {
        "state": figures.state,
        "parameters": f"{figures.parameters:,}" if figures.parameters else "",
        "steps": f"{figures.step:,}{steps}" if figures.step else "",
        "validation loss": "" if figures.validation_loss is None else f"{figures.validation_loss:.4f}",
        "bits per byte": "" if figures.bits_per_byte is None else f"{figures.bits_per_byte:.4f}",
        "tokens seen": f"{figures.tokens:,}" if figures.tokens else "",
        "tokens per second": f"{figures.tokens_per_second:,.0f}" if figures.tokens_per_second else "",
        "time of training": duration(figures.seconds) if figures.seconds else "",
    }
    return table(figures.name, [(name, value) for name, value in values.items() if value])


@html.register
def of_record(record: RunRecord) -> str:
    drawn = of_figures(record.figures())
    if record.metrics.steps:
        guesses = record.guesses(find(f"{record.folder}/")[1].vocab_size)
        # an image, so that its styles do not affect the notebook
        drawn += boxed(loss_svg(record.metrics, guesses), "Loss by training step")
    return drawn


@html.register
def of_run(run: Run) -> str:
    return of_record(RunRecord(run.folder))


def rows_of(model: Decoder) -> Rows:
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}.values()
    dtypes = dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in model.parameters())
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    memory = f"{size_of(sum(map(bytes_of, tensors)))} in {', '.join(dtypes)} on {model.device}"
    few = [("of these are trained", f"{trained:,}")] if trained < sum(one.numel() for one in model.parameters()) else []
    return [*described(model.config), *few, ("memory of the weights", memory), cached(model.config)]


def described(config: DecoderConfig) -> Rows:
    count, active = parameters(config), active_parameters(config)
    used = f", of which a token uses {active:,}" if active < count else ""
    return [*describe_parts(config), ("parameters", f"{count:,}{used}")]


def cached(config: DecoderConfig) -> tuple[str, str]:
    return "memory of the cache", f"{size_of(cache_bytes_per_token(config))} per token, in 16 bits"


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    # notebooks align to the right by default
    left = 'style="text-align:left"'
    body = "".join(f"<tr><th {left}>{visible(name)}</th><td {left}>{visible(what)}</td></tr>" for name, what in rows)
    return f'<div style="overflow-x:auto"><b>{visible(title)}</b><table>{body}</table></div>'
