"""The configuration of a training run: data, model, updates, computation. Does not import torch."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from onward import families
from onward.base import fields
from onward.base.arguments import Range, check_fields, checked, named, shown
from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig
from onward.config.lora import LoRA
from onward.config.mesh import Mesh
from onward.config.mixtures import MovingWeight, check_weights
from onward.config.optimizers import MATRIX_OPTIMIZERS
from onward.config.ranges import BelowOne, NotNegative, Share, Size, SizeOrZero
from onward.training import presets

Extent = Annotated[float, Range(0, 1e15)]  # a share if below 1, else a number of steps
Weight = Annotated[float, Range(1e-9, 1e9)]
TokenCount = Annotated[int, Range(1, 10**15)]
Batches = Annotated[int, Range(1, 1 << 20)]  # windows per batch, or batches per step
BatchesOrZero = Annotated[int, Range(0, 1 << 20)]
TRACKERS = "tensorboard", "wandb"
Seed = Annotated[int, Range(1 - (1 << 63), (1 << 63) - 1)]


@dataclass(frozen=True)
class DataOptions:
    """The data. A source is a text, or a folder of tokens written by `onward data prepare`."""

    sources: tuple[str, ...] = ("embedded",)  # files, folders, globs, pipes, hf://NAME, - (stdin) or a corpus name
    weights: tuple[Weight | MovingWeight, ...] = ()  # share of each source, or a ramp; default: proportional to size
    tokenizer: str = ""  # char, byte, bpe:VOCABULARY or a path; default: that of prepared sources, or bpe:4096
    validation: str = "0.1"  # a text, the share of each source's end to hold out (at most 4 million tokens), or none
    field: str = "text"  # field of .jsonl, .parquet and hf:// records that holds the text
    encoding: str = "utf-8"  # encoding of the text files
    raw: bool = False  # read HTML, XML, Markdown and notebooks with their markup
    repeated_lines: Share = 0.3  # leave out lines on at least this fraction of a source's pages; 0: keep all
    pack: Literal["stream", "documents"] = "stream"  # documents: a token attends only to its own document


@dataclass(frozen=True)
class UpdateOptions:
    """How weights are updated: the loss and the optimizer."""

    optimizer: str = ""  # adamw; muon or normuon, for matrices of blocks; module:Class; default: see preset, or adamw
    loss: str = ""  # module:NAME, a function of (model, batch) or an onward.Loss; default: the cross-entropy
    learning_rate: NotNegative | None = None  # peak; default: 0.5 / d_model (mup: 0.5 / mup), twice that for (nor)muon
    mup: SizeOrZero = 0  # width for which learning_rate is given; muP adapts it to the model's width; 0: no muP
    schedule: Literal["wsd", "cosine", "linear", "constant"] = "wsd"  # wsd: warm-up, stable, then linear decay
    warmup: Extent = 0.05  # warm-up of the learning rate: a share of the steps or, if 1 or more, a number of steps
    decay: Extent = 0.35  # decay of the learning rate (wsd): a share of the steps or, if 1 or more, a number of steps
    min_lr_ratio: Share = 0.05  # learning rate at the last step, as a fraction of the peak
    weight_decay: NotNegative = 0.1  # weight decay of matrices; there is none for norms and biases
    beta1: Share = 0.9  # decay rate of the mean of gradients; also the momentum of muon
    beta2: Share = 0.99  # decay rate of the mean of squared gradients
    clip: NotNegative = 1.0  # maximum norm of the gradient; 0: no limit
    label_smoothing: BelowOne = 0.0  # share of the target's probability to spread over the vocabulary
    z_loss: NotNegative = 0.0  # weight of the squared log of the softmax's denominator (PaLM: 1e-4)
    balance_loss: NotNegative = 0.01  # weight of the loss that balances the load of experts with a softmax router
    balance_bias: NotNegative = 0.001  # change per step of the routing bias of experts with a sigmoid router
    average: BelowOne = 0.0  # decay rate of a moving average of the weights, which is saved as the model; 0: none


@dataclass(frozen=True)
class ComputeOptions:
    """How training is computed. These options change results by rounding errors at most."""

    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # precision of matrix products; auto: the fastest
    compile: bool = False  # compile the blocks with torch.compile, which delays the start but makes steps faster
    recompute: bool = False  # recompute activations in the backward pass, which saves memory but takes 1/3 more time
    loss_chunk: SizeOrZero = 0  # number of tokens whose logits are in memory at once; 0: as many as fit in 128 MiB
    experts: Literal["auto", "loop", "grouped"] = "auto"  # backend of experts; auto: the faster one, as measured
    mesh: str = ""  # processes by axis: "replicate=2 shard=4 context=2 tensor=2"; "": replicas, or shards if needed


@dataclass(frozen=True)
class WatchOptions:
    """Measurements and saves. They affect the weights only if a step fails: the run then goes back to a save."""

    validate_every: SizeOrZero = 0  # steps between validations, each with a save; 0: up to twenty in the run
    validation_tokens: TokenCount = 16_384  # number of tokens of the validation text to use during the run
    evaluation_tokens: SizeOrZero = 0  # validation tokens to use after the last step; 0: all, or fewer with --time
    evaluate_tasks: str = ""  # tasks of onward evaluate at each validation, such as "cloze, copying"; default: none
    task_limit: Size = 100  # maximum number of questions in each of these tasks
    keep: Size = 2  # number of recent saves to keep, in addition to the best
    spike: NotNegative = 8.0  # a loss this many deviations above the recent median can fail a step; 0: no limit
    track: tuple[str, ...] = ()  # tensorboard and wandb, in addition to metrics.jsonl
    prompt: str = ""  # prompt for the sample shown at each validation; default: the beginning of the validation text


@named
@dataclass(frozen=True)
class RunConfig(DataOptions, UpdateOptions, ComputeOptions, WatchOptions):
    """Settings of a run: all options that determine its results. Raises a UserError for values out of range or in
    contradiction; FinetuneConfig is the subclass for fine-tuning."""

    fixed: ClassVar[tuple[str, ...]] = ()  # fields that a user cannot set

    out: str = ""  # folder of the run; default: runs/ followed by the name of the first source
    base: str = ""  # model to start from: a folder or a name on the hub; default: new weights
    preset: str = "auto"  # tiny, mini, small, medium or a release; auto: chosen to fit --time, or mini without --time
    model: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of DecoderConfig to change
    imports: tuple[str, ...] = ()  # modules that define custom parts; they are imported first
    steps: SizeOrZero = 0  # number of optimizer steps; 0: as many as --time or --epochs allow
    time: str = ""  # time limit for the entire command, such as 100s, 5m or 2h; sets the number of steps, see schedule
    epochs: NotNegative = 0.0  # number of passes over the training text
    batch_size: BatchesOrZero = 0  # windows of context_length tokens per forward and backward pass; 0: see preset, or 8
    accumulation: Batches = 1  # batches per step across all processes; their gradients are summed
    seed: Seed = 0  # seed of the weights, the data order and dropout

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "model", presets.plain_changes(self.model))
        chosen = [name for name in ("steps", "time", "epochs") if getattr(self, name)]
        if len(chosen) > 1:
            raise UserError(f"{' and '.join(chosen)} are given together: choose one of steps, time and epochs")
        if not chosen:
            object.__setattr__(self, "time", "5m")
        if self.time and seconds(self.time) < 1:
            raise UserError(f"time is {self.time!r}, too short to train a model: give at least a second")
        if self.weights and len(self.weights) != len(self.sources):
            raise UserError(f"there are {len(self.weights)} weights for {len(self.sources)} sources: give one for each")
        check_weights(self.weights)
        if self.time and self.curriculum:
            raise UserError(
                "weights that change over the run need a known length: give steps or epochs instead of time"
            )
        if unknown := [name for name in self.track if name not in TRACKERS]:
            raise UserError(f"track is {unknown[0]!r}: {fields.nearest(unknown[0], TRACKERS)}")
        if not self.dialed:
            object.__setattr__(self, "optimizer", self.optimizer or "adamw")
            object.__setattr__(self, "batch_size", self.batch_size or 8)
        if self.preset not in presets.PRESETS and self.preset not in (known := families.presets()):
            close = fields.nearest(self.preset, {*presets.PRESETS, *known})
            raise UserError(f"preset is {self.preset!r}, which `onward models` does not list: {close}")
        if self.mesh:
            object.__setattr__(self, "mesh", str(Mesh.parse(self.mesh)))
        for name in "out", "validation", "tokenizer", "sources":
            if "\0" in "".join(getattr(self, name)):
                raise UserError(f"{name} is {shown(getattr(self, name))}: a path cannot contain a zero byte")
        if self.mup and (self.base or ":" in self.optimizer):
            reason = "those of base are trained" if self.base else f"optimizer is {self.optimizer}"
            raise UserError(f"mup is only for new weights with adamw, muon or normuon ({reason}): leave it out")
        if not self.sources:
            raise UserError("no text to train on: name files or folders, or the corpus `embedded`")

    @checked
    def decoder(self, vocab_size: int) -> DecoderConfig:
        """Return the configuration of the model to train, for a vocabulary of `vocab_size` tokens."""
        return presets.decoder(self.preset, vocab_size, self.model)

    @checked
    def peak_learning_rate(self, d_model: int) -> float:
        """Return the learning rate after the warm-up; if none is given, it follows from the model's width `d_model`."""
        usual = (1.0 if self.optimizer in MATRIX_OPTIMIZERS else 0.5) / (self.mup or d_model)
        return usual if self.learning_rate is None else self.learning_rate

    @property
    def curriculum(self) -> bool:
        """Whether the sampling weights of the sources change over the run."""
        return any(isinstance(weight, MovingWeight) for weight in self.weights)

    @property
    def windows(self) -> int:
        """The number of windows (sequences of `context_length` tokens) that the run trains on; 1 while the number of
        steps is not known yet."""
        return max(1, self.steps * self.batch_size * self.accumulation)

    @property
    def dialed(self) -> bool:
        """Whether Onward chooses the size of the model, its batch size and its optimizer to fit the time of the run."""
        return self.preset == "auto" and bool(self.time) and not self.base

    @property
    def adapters(self) -> LoRA | None:
        """The low-rank adapters to train; None, as in pre-training, if the run trains the weights."""
        return None

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the user's Python modules that must be imported before the run: `imports`, and the modules of an
        optimizer and a loss given as "module:NAME"."""
        named = (text.partition(":") for text in (self.optimizer, self.loss))
        return (*dict.fromkeys((*self.imports, *(module for module, colon, _ in named if colon))),)

    @property
    def validation_interval(self) -> int:
        """The number of steps between validations, each with a save."""
        return self.validate_every or max(1, -(-self.steps // 20))


NUMBER = r"[0-9]+\.?[0-9]*"
UNITS = {"": 1}
UNITS |= dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1)
UNITS |= dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60)
UNITS |= dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600)


def seconds(text: str, name: str = "time") -> float:
    """Return the seconds of a duration such as 100s, "5 minutes" or 2h; a number without a unit is in seconds. Raises a
    UserError that names the option `name` for any other text."""
    match = re.fullmatch(rf"({NUMBER})\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in UNITS or float(match[1]) <= 0:
        raise UserError(f"{name} is {text!r}: write a number with s, m or h (or sec, minutes, hours, ...), like 100s")
    return float(match[1]) * UNITS[match[2]]
