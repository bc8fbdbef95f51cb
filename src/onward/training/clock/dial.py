"""Chooses the size of the model, its context and its batch for a given training time, with a scaling law of the loss
fitted to small runs.

    python -m benchmarks.dial

repeats these runs and fits the constants. The law gives the loss in bits per byte, relative to the bits per byte that
bz2 needs for the text, as a function of the number of parameters in the blocks and the number of training bytes, so
that one law applies to all texts and tokenizers. Repeated tokens count less with each repetition, as in Muennighoff et
al., "Scaling Data-Constrained Language Models" (arXiv:2305.16264).
"""

import bz2
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from onward.base.errors import UserError
from onward.model.decoder import Decoder
from onward.planning.laws import LossLaw
from onward.text.tokenizer import Tokenizer
from onward.training.clock.calibration import precisions_of
from onward.training.config import RunConfig
from onward.training.inputs.texts import Inputs
from onward.training.step.build import build_trainer
from onward.training.step.loss import Loss
from onward.training.step.trainer import StepPlan

LAW = LossLaw(E=0.5, A=129, B=6.31, alpha=0.6, beta=0.18)  # N: parameters of the blocks, D: bytes
REPEATS = 15.4  # repetitions that reach 63 % of the maximum effect of repetition (R* of the paper)
TIE = 0.005  # if forecasts differ by less, take the larger size, which the law underrates in short runs
SPREAD = 0.1  # maximum relative error of the law on the runs that it was fitted to
SHARE = 0.05  # maximum share of the time budget for timing
TIMED = 3  # timed steps of each size
OVERHEAD = 0.8  # share of the time for training steps
SAMPLE = 1 << 20  # maximum number of tokens to read from the text, and of bytes to compress with bz2
WINDOWS, FEW, BATCH_EXPONENT = 8, 4e6, 0.38  # windows per step up to FEW tokens; exponent of their growth
SIZES: list[dict[str, Any]] = [
    {"d_model": 64, "n_layers": 2, "n_heads": 2, "context_length": 128},
    {"d_model": 96, "n_layers": 3, "n_heads": 3, "context_length": 128},
    {"d_model": 128, "n_layers": 3, "n_heads": 4, "context_length": 128},
    {"d_model": 192, "n_layers": 4, "n_heads": 6, "context_length": 128},
    {"d_model": 256, "n_layers": 5, "n_heads": 4, "context_length": 256},
    {"d_model": 384, "n_layers": 6, "n_heads": 6, "context_length": 256},
    {"d_model": 512, "n_layers": 8, "n_heads": 8, "context_length": 512},
    {"d_model": 768, "n_layers": 12, "n_heads": 12, "context_length": 1024},
]


@dataclass(frozen=True)
class Candidate:
    """A model size that could be trained within the time limit, with its forecast loss."""

    model: dict[str, Any]  # chosen fields of DecoderConfig
    batch_size: int
    parameters: int
    step_seconds: float
    epochs: float  # number of passes over the training text
    bits_per_byte: float  # forecast of the scaling law


@dataclass(frozen=True)
class Choice:
    """The model size that Onward chose for a run with a time limit, and the candidates it was chosen from."""

    candidates: tuple[Candidate, ...]  # in ascending size
    chosen: Candidate
    loss: tuple[float, float]  # range of the forecast, in nats per token

    def __str__(self) -> str:
        c = self.chosen
        sizes = " ".join(f"{name}={value}" for name, value in c.model.items())
        others = ", ".join(f"{o.bits_per_byte:.2f} with {o.parameters:,}" for o in self.candidates if o is not c)
        return (
            f"chosen for the time: {c.parameters:,} parameters{f' ({sizes})' if sizes else ''}, {c.batch_size} windows "
            f"a step of {c.step_seconds * 1e3:.0f} ms, {c.epochs:.1f} times the text\nforecast: validation loss "
            f"{self.loss[0]:.2f} to {self.loss[1]:.2f}, about {c.bits_per_byte:.2f} bits per byte"
            + (f"; {others} parameters" if others else "")
        )


def effective(tokens: float, unique: int) -> float:
    """Compute the number of distinct tokens that would improve a model as much as training on `tokens` tokens, of which
    only `unique` are distinct and the rest are repetitions (Muennighoff et al. 2023)."""
    if tokens <= unique:
        return tokens
    return unique * (1 + REPEATS * (1 - math.exp(-(tokens / unique - 1) / REPEATS)))


@dataclass(frozen=True)
class Compression:
    """Two measures of a training text: its bz2-compressed bits per byte (how hard the text is to predict) and its bytes
    per token."""

    bits_per_byte: float  # bits per byte after compression by bz2
    bytes_per_token: float


def compression(tokenizer: Tokenizer, inputs: Inputs) -> Compression:
    """Measure the bits per byte of at most 1 MiB from the beginnings of the training sources, compressed by bz2, and
    the bytes per token. `inputs` are the prepared texts of a run."""
    pieces = [source[: SAMPLE // len(inputs.train)] for source in inputs.train]
    data = "".join(tokenizer.decode(piece.tolist()) for piece in pieces).encode()
    bits = 8 * len(bz2.compress(data[:SAMPLE])) / max(1, len(data[:SAMPLE]))
    return Compression(bits, len(data) / max(1, sum(map(len, pieces))))


def step_seconds(config: RunConfig, model: Decoder, inputs: Inputs, loss: Loss | None) -> float:
    """Measure the seconds of an optimizer step of `model`, the fastest of three after a first one that compiles
    kernels, in the precision that is likely the fastest. `loss` defaults to the configured cross-entropy."""
    if config.precision == "auto":
        config = replace(config, precision=precisions_of(model.device)[-1])
    trainer = build_trainer(config, model, loss=loss)
    windows = inputs.windows(config, model.config.context_length)
    plan = StepPlan([windows.read(range(config.batch_size)).to(model.device)] * config.accumulation)
    trainer.train_step(plan)
    return max(1e-6, min(trainer.train_step(plan).seconds for _ in range(TIMED)))


def dial(
    config: RunConfig,
    tokenizer: Tokenizer,
    inputs: Inputs,
    device: torch.device,
    limit: float,
    loss: Loss | None = None,
    timing: Callable[..., float] = step_seconds,
    clock: Callable[[], float] = perf_counter,
) -> tuple[RunConfig, Choice | None]:
    """Choose the model size, the batch size and the optimizer for `limit` seconds of training, where the configuration
    leaves them open. Returns the configuration with these options set, and the Choice, which explains them; the Choice
    is None if no size is possible with the options that the user set.

    Sizes are timed in increasing order by `timing`, which returns the seconds of a step, until the forecast loss
    becomes worse or timing the next size would exceed a twentieth of the time, by `clock`.
    """
    candidates, seconds, taken = list[Candidate](), 0.0, 0.0
    text = compression(tokenizer, inputs)
    began = clock()
    config = replace(config, optimizer=config.optimizer or "normuon")
    for size in SIZES:
        chosen = {name: value for name, value in size.items() if name not in config.model}
        trial = replace(config, model=chosen | config.model, batch_size=config.batch_size or WINDOWS)
        try:
            model = Decoder(trial.decoder(tokenizer.vocab_size)).to(device)
        except UserError:  # the user's fields do not fit this size
            continue
        parameters = sum(p.numel() for p in model.parameters())
        if candidates:
            growth = parameters / candidates[-1].parameters
            expected = taken + (growth - 1) * (1 + TIMED) * seconds
            if growth == 1 or clock() - began + expected > SHARE * limit:
                break
        start = clock()
        seconds = timing(trial, model, inputs, loss)
        taken = clock() - start
        tokens = OVERHEAD * limit / seconds * trial.batch_size * model.config.context_length
        longer = 1 if config.batch_size else 2 ** max(0, round(BATCH_EXPONENT * math.log2(tokens / FEW)))
        read = effective(tokens, inputs.tokens) * text.bytes_per_token
        blocks = sum(p.numel() for p in model.blocks.parameters())
        bits = text.bits_per_byte * LAW.loss(blocks, read)
        epochs = tokens / max(1, inputs.tokens)
        candidates.append(Candidate(chosen, longer * trial.batch_size, parameters, longer * seconds, epochs, bits))
        if len(candidates) > 1 and bits > candidates[-2].bits_per_byte:
            break
    if not candidates:
        return replace(config, batch_size=config.batch_size or WINDOWS), None
    lowest = min(one.bits_per_byte for one in candidates)
    best = max((one for one in candidates if one.bits_per_byte <= (1 + TIE) * lowest), key=lambda one: one.parameters)
    nats = best.bits_per_byte * math.log(2) * text.bytes_per_token
    choice = Choice(tuple(candidates), best, (nats * (1 - SPREAD), nats * (1 + SPREAD)))
    return replace(config, model=best.model | config.model, batch_size=best.batch_size), choice
