"""A training run: a folder that holds its configuration, its data, its metrics, and a model that gets better.

runs/mybook/
  run.json              the RunConfig, with steps and precision fixed
  data/                 the tokens, of training and validation
  config.json, model.safetensors, tokenizer.json    the model of the newest save, as a Hugging Face folder
  checkpoints/step-N/   the newest save with all that is needed to go on
  metrics.jsonl         a line per step and per validation
"""

import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch

from onward import fields
from onward.checkpoint.training import load_state, restore, save_state, saves
from onward.data.sources import documents, provenance
from onward.data.tokens import TokenData, load_tokens, write_tokens
from onward.data.windows import Windows, validation_windows
from onward.device import choose_device
from onward.errors import UserError
from onward.files import read_json, write_json, written_whole
from onward.model.compiling import compile_blocks
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer, train_tokenizer
from onward.timing import fastest
from onward.training.config import RunConfig, seconds
from onward.training.loop import Batch, Step, fit, loss_sum, mean_loss, mixed
from onward.training.optimiser import adamw, learning_rate_share


@dataclass(frozen=True)
class Validation:
    """How well the model predicts text it was not trained on."""

    step: int
    validation_loss: float  # nats per token
    tokens: int


Event = Step | Validation


class Run:
    """A run that can go on: `start` or `resume` makes it, `train` trains it."""

    def __init__(self, config: RunConfig, model: Decoder, tokenizer: Tokenizer, data: TokenData, hf: Any) -> None:
        self.config, self.model, self.tokenizer, self.data, self.hf = config, model, tokenizer, data, hf
        self.folder = Path(config.out)
        self.device = model.embed.weight.device
        self.rate = 0.5 / model.config.d_model if config.learning_rate is None else config.learning_rate
        self.optimiser = self.make_optimiser()
        self.windows = Windows(data.train, model.config.context_length, config.seed)
        self.step, self.seconds = 0, 0.0

    def make_optimiser(self) -> torch.optim.Optimizer:
        c = self.config
        return adamw(self.model, self.rate, c.weight_decay, (c.beta1, c.beta2))

    @classmethod
    def start(cls, config: RunConfig) -> "Run":
        """Prepare the data, the tokenizer and a fresh model, and fix what was left open: steps and precision."""
        folder = Path(config.out)
        if saves(folder):
            raise UserError(f"{folder} holds a run already: --resume {quote(str(folder))}, or choose another --out")
        new = not folder.exists()
        try:
            device = choose_device(config.device)
            tokenizer, data = read_data(config, folder)
            torch.manual_seed(config.seed)
            model = Decoder(config.decoder(tokenizer.vocab_size)).to(device)
            hf = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            run = cls(config, model, tokenizer, data, hf)
            run.config = run.fixed()
            tokenizer.save(folder)
            write_json(folder / "run.json", fields.plain(run.config))
            run.save()
        except BaseException:
            if new:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return run

    @classmethod
    def resume(cls, folder: Path) -> "Run":
        """Go on from the newest save of a run, exactly as if it had never stopped."""
        config = replace(fields.build(RunConfig, read_json(folder / "run.json"), "run.json"), out=str(folder))
        if (folder / "result.json").exists():
            raise UserError(f"{folder} has finished its {config.steps:,} steps: start another with --out")
        model, tensors, progress = load_state(folder, choose_device(config.device))
        run = cls(
            config, model, Tokenizer.load(folder), load_tokens(folder / "data"), read_json(folder / "config.json")
        )
        restore(tensors, model, run.optimiser)
        run.step, run.seconds = progress["step"], progress["seconds"]
        run.save()  # shows the newest save in the folder, where a kill came between the two
        for name in "metrics.jsonl", "samples.jsonl":
            cut_lines(folder / name, run.step)
        return run

    def train(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Train to the last step, or until `stop()`; metrics and saves are written, the events yielded as they come."""
        config = self.config
        if config.compile:
            compile_blocks(self.model)
        began = perf_counter() - self.seconds
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as metrics:

            def record(event: Event) -> Event:
                metrics.write(json.dumps(asdict(event)) + "\n")
                metrics.flush()
                return event

            if self.step and self.due() and self.data.validation is not None:
                yield record(self.validate())  # a save comes before it, and the run may have stopped between them
            for event in self.fit(range(self.step, config.steps)):
                self.step, self.seconds = event.step, perf_counter() - began
                yield record(event)
                stopping = stop()
                if stopping or self.due():
                    self.save()
                if self.due() and self.data.validation is not None:
                    yield record(self.validate())
                if stopping:
                    return

    def due(self) -> bool:
        """Whether this step is one to save and validate at."""
        every = self.config.validate_every or max(1, self.config.steps // 20)
        return self.step % every == 0 or self.step == self.config.steps

    def fit(self, steps: range) -> Iterator[Step]:
        """The training loop over this run's windows."""
        c = self.config
        share = lambda step: learning_rate_share(step, max(1, c.steps), c.warmup, c.final_share)
        return fit(
            self.model,
            self.batches,
            self.optimiser,
            lambda step: self.rate * share(step),
            steps,
            clip=c.clip,
            precision=c.precision,
        )

    def batches(self, step: int) -> list[Batch]:
        """The windows of a step: which they are depends on the seed and the step alone."""
        c = self.config
        first = step * c.accumulation * c.batch_size
        starts = range(first, first + c.accumulation * c.batch_size, c.batch_size)
        return [self.batch(self.windows.batch(start, c.batch_size)) for start in starts]

    def batch(self, windows: np.ndarray) -> Batch:
        """Windows (B, T + 1) as tokens and the tokens after them."""
        return Batch.of(torch.from_numpy(windows).to(self.device))

    def validate(self) -> Validation:
        """The loss over the validation text: over evenly spread windows and, after the last step, over the whole."""
        assert self.data.validation is not None
        length, size = self.model.config.context_length, self.config.batch_size
        found = validation_windows(self.data.validation, length)
        if not self.step or self.step < self.config.steps:
            found = found[:: max(1, len(found) * length // self.config.validation_tokens)]
        batches = (self.batch(found[i : i + size]) for i in range(0, len(found), size))
        loss, tokens = mean_loss(self.model, batches, self.config.precision)
        return Validation(self.step, loss, tokens)

    def save(self) -> None:
        """Save the state, so that the run can be resumed from here."""
        progress = {"step": self.step, "seconds": self.seconds}
        save_state(self.folder, self.model, self.optimiser, progress, self.hf)

    def fixed(self) -> RunConfig:
        """The configuration with nothing left open: precision and steps, chosen by timing where it must be."""
        config = self.config
        began = perf_counter()
        if config.precision == "auto":
            config = self.config = replace(config, precision=self.fastest_precision())
        per_step = config.batch_size * config.accumulation
        if config.epochs:
            config = replace(config, epochs=0.0, steps=max(1, round(config.epochs * len(self.windows) / per_step)))
        if config.time:
            budget = seconds(config.time)
            step, validations = self.timing(budget)
            left = max(budget / 2, budget - (perf_counter() - began) - validations)
            config = replace(config, time="", steps=max(1, int(0.95 * left / step)))  # saves and samples take time too
        return config

    def fastest_precision(self) -> Literal["fp32", "bf16"]:
        """bf16 where the device computes products in it and that is faster for this model, else fp32."""
        if self.device.type == "cuda":
            return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
        hardware = (getattr(torch.cpu, f"_is_{name}_supported", bool) for name in ("avx512_bf16", "amx_tile"))
        if self.device.type != "cpu" or not any(has() for has in hardware):
            return "fp32"
        batch = self.batches(0)[0]

        def run(precision: str) -> None:
            with mixed(precision, self.device):
                loss = loss_sum(self.model, batch)
            torch.autograd.grad(loss, list(self.model.parameters()), allow_unused=True)

        with torch.random.fork_rng():
            way = fastest({"fp32": partial(run, "fp32"), "bf16": partial(run, "bf16")}, rounds=3)
        return "bf16" if way == "bf16" else "fp32"

    def timing(self, budget: float) -> tuple[float, float]:
        """Seconds per step and for all validations of a run of that many seconds, measured on throw-away steps."""
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        taken: list[float] = []
        with torch.random.fork_rng():
            for event in self.fit(range(1_000)):
                taken.append(event.seconds)
                if sum(taken) > min(2.0, budget / 20) and len(taken) > 3:
                    break
            start = perf_counter()
            if self.data.validation is not None:
                tokens = self.validate().tokens
            once = perf_counter() - start
        self.model.load_state_dict(weights)
        self.optimiser = self.make_optimiser()
        whole = once * len(self.data.validation) / tokens if self.data.validation is not None else 0.0
        return statistics.median(taken[1:]), 20 * once + whole


def read_data(config: RunConfig, folder: Path) -> tuple[Tokenizer, TokenData]:
    """The tokenizer and the tokens of a run, from its texts; standard input is stored in the run first."""
    sources = list(config.sources)
    if "-" in sources:
        stored = folder / "data" / "stdin.txt"
        with written_whole(stored) as new:
            new.write_bytes(sys.stdin.buffer.read())
        sources[sources.index("-")] = str(stored)
    read = lambda names: documents(names, field=config.field, encoding=config.encoding)
    texts = list(read(sources))
    tokenizer = train_tokenizer(config.tokenizer, texts)
    held = held_out(config.validation, read)
    return tokenizer, write_tokens(folder / "data", tokenizer, texts, held, [provenance(name) for name in sources])


def held_out(validation: str, read: Callable[[list[str]], Iterator[str]]) -> float | Iterator[str] | None:
    """What --validation means: a share, other documents, or nothing."""
    if validation == "none":
        return None
    try:
        share = float(validation)
    except ValueError:
        return read([validation])
    if not 0 < share < 1:
        raise UserError(f"validation is {validation}: give a file, a share above 0 and below 1, or none")
    return share


def cut_lines(path: Path, step: int) -> None:
    """Drop the lines about what came after a step, and what is done again at it: its validation and its sample."""
    if path.exists():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in lines if (row := json.loads(line))["step"] <= step - ("loss" not in row)]
        with written_whole(path) as new:
            new.write_text("".join(kept), encoding="utf-8")
