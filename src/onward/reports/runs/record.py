"""Reads the files in the folder of a run or a model, other than its weights. Does not import torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from math import exp, prod
from pathlib import Path
from re import search
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from onward.base import fields
from onward.base.errors import UserError
from onward.base.fields import text
from onward.base.files import read_json
from onward.base.notebook import Shown
from onward.config.decoder import DecoderConfig, Experts, each
from onward.planning.fits import RunPoint
from onward.reports.runs.metrics import Metrics, numbers, read_lines, read_metrics
from onward.reports.runs.scores import TaskScore, read_scores
from onward.training.finetuning.config import config_class
from onward.training.finetuning.quantization import QuantizationError
from onward.training.run.lock import is_running

DATED = "result.json", "metrics.jsonl", "run.json", "config.json"  # the newest of these files dates a folder
State = Literal["running", "stopped", "finished", "no run"]


@dataclass(frozen=True)
class Figures(Shown):
    """The figures of a run or a model, such as its loss: from the final evaluation or, before it, from the last
    validation. A figure that is not recorded is None or 0."""

    name: str
    state: State  # "no run": the folder contains only a model
    parameters: int | None
    step: int
    steps: int | None  # planned number of steps; None until the time limit has fixed it
    validation_loss: float | None  # nats per token
    perplexity: float | None
    bits_per_byte: float | None
    tokens: int  # number of training tokens
    tokens_per_second: float | None
    seconds: float | None  # seconds of training
    when: str  # local time of the last change of the files DATED


@dataclass(frozen=True)
class RunRecord(Shown):
    """The records in the folder of a run or a model, such as options and measurements; each file is read when it is
    needed. A missing or damaged file reads as empty."""

    folder: Path

    @cached_property
    def metrics(self) -> Metrics:
        return read_metrics(self.folder)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Rows: step, prompt, text and, for completions with a reward, the reward and its terms."""
        return read_lines(self.folder / "samples.jsonl")

    @cached_property
    def options(self) -> dict[str, Any]:
        return read_table(self.folder / "run.json")

    @property
    def modules(self) -> tuple[str, ...]:
        """The user's modules that the run imports."""
        try:
            return fields.build(config_class(self.options), self.options).modules
        except UserError:
            return ()

    @cached_property
    def data(self) -> dict[str, Any]:
        """Sources, and counts of documents, tokens and bytes, without the options of the preparation."""
        return {k: v for k, v in read_table(self.folder / "data/data.json").items() if k != "settings"}

    @property
    def quantization(self) -> str:
        """A sentence on the error of a quantized base; "" for other runs."""
        known = read_table(self.folder / "inputs.json").get("quantization")
        try:
            return str(fields.build(QuantizationError, known)) if known else ""
        except UserError:
            return ""

    @property
    def notes(self) -> list[str]:
        """Sentences on the shapes of examples, and on how many were cut or left out."""
        known = read_table(self.folder / "inputs.json").get("notes")
        return [str(note) for note in known] if isinstance(known, list) else []

    @cached_property
    def scores(self) -> list[TaskScore]:
        """Stored scores on benchmark tasks, measured after the last training step."""
        steps = self.metrics.steps
        return read_scores(self.folder, int(steps[-1]["step"]) if steps else 0)

    @cached_property
    def result(self) -> dict[str, float]:
        return numbers(read_table(self.folder / "result.json"))

    @property
    def method(self) -> str:
        """The kind of the fine-tuning method; "sft" for pre-training, whose validation loss is the same cross-entropy
        of tokens."""
        method = self.options.get("method")
        return str(method.get("kind")) if isinstance(method, dict) else "sft"

    def guesses(self, vocab_size: int) -> int:
        """`vocab_size`, for the line of a uniform guess, if the loss is a cross-entropy of tokens; else 0."""
        return vocab_size if self.method == "sft" else 0

    @property
    def state(self) -> State:
        if not (self.folder / "run.json").exists():
            return "no run"
        if (self.folder / "result.json").exists():
            return "finished"
        return "running" if is_running(self.folder) else "stopped"  # a running process holds a lock

    @property
    def parameters(self) -> int | None:
        """The number of parameters, by the shapes in model.safetensors; None if the file cannot be read."""
        try:
            with safe_open(self.folder / "model.safetensors", framework="np") as file:
                return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            return None

    def figures(self) -> Figures:
        steps, final, validations = self.metrics.steps, self.result, self.metrics.validations
        last = validations[-1] if validations else {}
        loss = final.get("loss", last.get("validation_loss"))
        spent, tokens = (sum(row.get(key, 0) for row in steps) for key in ("seconds", "tokens"))
        planned = numbers(self.options).get("steps")
        language = self.method == "sft"  # other losses are not cross-entropies of tokens
        return Figures(
            name=str(self.folder),
            state=self.state,
            parameters=self.parameters,
            step=int(steps[-1]["step"]) if steps else 0,
            steps=int(planned) if planned else None,
            validation_loss=loss,
            perplexity=exp(min(loss, 700)) if loss is not None and language else None,
            bits_per_byte=final.get("bits_per_byte", last.get("bits_per_byte")),
            tokens=int(tokens),
            tokens_per_second=tokens / spent if tokens and spent else None,
            seconds=final.get("seconds") or spent or None,
            when=self.when,
        )

    @property
    def when(self) -> str:
        """Local time of the last change, such as 2026-11-22 14:05."""
        times = [path.stat().st_mtime for name in DATED if (path := self.folder / name).exists()]
        return datetime.fromtimestamp(max(times)).isoformat(" ", "minutes") if times else ""


def find_runs(folder: Path) -> list[Path]:
    """Find the run folders (with a run.json) in a folder, down to three levels and except in hidden folders, and the
    folder itself if it is one. Returns their paths sorted by name."""
    patterns = ["/".join(["*"] * depth + ["run.json"]) for depth in range(4)]
    folders = {path.parent for pattern in patterns for path in folder.glob(pattern)}
    return sorted(run for run in folders if not any(part.startswith(".") for part in run.relative_to(folder).parts))


def finished_runs(folder: Path) -> tuple[list[RunPoint], list[str]]:
    """Parameters, training tokens and losses of the finished runs in a folder, the data of scaling laws; and the names
    of all other runs, each with the reason, such as `runs/a (stopped)`."""
    points, left_out = list[RunPoint](), list[str]()
    for run in (RunRecord(path).figures() for path in find_runs(folder)):
        if run.state == "finished" and run.parameters and run.validation_loss:
            points.append(RunPoint(run.parameters, run.tokens, run.validation_loss))
        else:
            missing = "no validation loss" if run.parameters else "no weights"
            left_out.append(f"{run.name} ({missing if run.state == 'finished' else run.state})")
    return points, left_out


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or damaged."""
    try:
        return read_json(path)
    except UserError:
        return {}


def options_in_effect(options: Mapping[str, Any], model: DecoderConfig) -> list[tuple[str, str, str]]:
    """(name, value, meaning) for each option that had an effect, from run.json. A special value (0, none, "") is
    replaced by its explanation in the help text; the page describes the model's fields itself."""
    try:
        config = fields.build(config_class(options), options)
    except UserError:
        return [(name, str(value), "") for name, value in leaves(options)]
    known = {name: value for name, value in fields.plain(config).items() if value or name not in ("time", "epochs")}
    known |= {
        "learning_rate": config.peak_learning_rate(model.d_model),
        "validate_every": config.validation_interval,
    }
    docs = fields.docs(type(config))
    mixture = any(isinstance(part, Experts) for part in each(model.mlp))
    unshown = {"model", *config.fixed, *(() if mixture else ("experts", "balance_loss", "balance_bias"))}
    rows = [
        (name, in_words(known[name], docs[name]), docs[name].partition(";")[0]) for name in known if name not in unshown
    ]
    return [row for row in rows if row[1] not in ("", "auto")]


def in_words(value: Any, meaning: str) -> str:
    """The value of an option; a special value (0, none, "", ()) is replaced by its explanation in the help text."""
    name = "none" if value is None else "0" if value == 0 else r'(?:""|\(\))'
    if not value and value is not False and (explained := search(f"; {name}: ([^;]*)", meaning)):
        return explained[1]
    return ", ".join(map(text, value)) if isinstance(value, list) else text(value)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each leaf, such as ("model.n_layers", 6)."""
    if isinstance(value, Mapping | list) and value:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
