"""The configuration of a fine-tuning run: that of a training run, plus a base model and a method. Does not import
torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from onward.base import fields
from onward.base.arguments import check_fields, checked, named
from onward.base.errors import UserError
from onward.base.fields import changed_fields
from onward.config.lora import Adapters, LoRA
from onward.config.optimizers import MATRIX_OPTIMIZERS
from onward.config.ranges import NotNegative, SizeOrZero
from onward.data.columns import renaming
from onward.training.config import RunConfig
from onward.training.methods import Method
from onward.training.methods.answers.sft import SFT
from onward.training.methods.reference import Synced

NOT_WITH_ADAPTERS = {"average": "which are not averaged", "balance_bias": "which leave routers unchanged"}


@dataclass(frozen=True)
class ExampleOptions:
    """Method, examples and adapters. docs/finetuning.md describes the data that each method needs."""

    method: Method = SFT()  # how the model learns from the examples
    columns: str = ""  # columns to rename, such as prompt=question,completion=answer: Onward's name = the file's name
    ignore: str = ""  # columns to leave out, such as notes,critique; other unused columns with text are an error
    template: str = ""  # chat template: chatml, llama3, mistral, gemma, plain or a file; default: the model's own
    length: SizeOrZero = 0  # maximum number of tokens in an example; 0: the model's context length, at most 4096
    too_long: Literal["error", "cut", "drop"] = "error"  # how to treat longer examples; cut: keep only the first tokens
    packed: bool = True  # pack as many examples into a row as fit; examples never attend to each other
    lora: Adapters | None = None  # adapters to train instead of the weights: a rank, or lora(rank=16, dora=true)
    first: Literal["", "merged", "frozen"] = ""  # if the base has an adapter and lora is given: merge or freeze it
    quantize: Literal["", "int8", "int4"] = ""  # store the frozen weights under the adapters as integers (QLoRA)


@named
@dataclass(frozen=True)
class FinetuneConfig(RunConfig, ExampleOptions):
    """Settings of a fine-tuning run: all options that determine its results. Raises a UserError for values out of range
    or in contradiction."""

    fixed: ClassVar[tuple[str, ...]] = (
        *("tokenizer", "field", "encoding", "raw", "repeated_lines", "pack", "preset", "model", "mup"),
        *("loss", "label_smoothing", "z_loss", "loss_chunk"),  # methods have these fields
    )

    learning_rate: NotNegative | None = None  # peak learning rate; default: the method's constant divided by d_model
    optimizer: str = "adamw"  # adamw; muon or normuon, for matrices of blocks; module:Class of a library
    weight_decay: NotNegative = 0.0  # weight decay of matrices; there is none for norms and biases
    out: str = ""  # folder of the run; default: runs/ and the names of model and method; for a draft: MODEL/draft

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.steps or self.time or self.epochs):
            object.__setattr__(self, "epochs", 1.0)
        super().__post_init__()
        if not self.base:
            raise UserError("no model to fine-tune: name its folder")
        renaming(self.columns)
        if self.weights and not self.method.by_record:
            raise UserError(
                f"Cannot weight the sources, because {self.method.kind} reads all sources together: leave out weights"
            )
        self.method.check()
        if self.lora and self.method.beside:
            raise UserError(f"lora is given with {self.method.kind}, which does not train the model: leave lora out")
        if self.quantize and not self.lora:
            raise UserError(f"quantize is {self.quantize!r} without adapters to train: give lora, or leave it out")
        if self.first and not self.lora:
            raise UserError(f"first is {self.first!r} without adapters on top of it: give lora, or leave it out")
        if self.adapters and self.adapters.dropout and not self.method.dropout:
            raise UserError(f"lora.dropout has no effect in {self.method.kind}, which uses no dropout: leave it out")
        if self.adapters and self.adapters.b_rate != 1 and self.optimizer in MATRIX_OPTIMIZERS:
            raise UserError(
                f"lora.b_rate is given with {self.optimizer}, whose updates have a fixed norm: leave it out, "
                "or use adamw"
            )
        if self.lora and isinstance(self.method.reference, Synced):
            raise UserError("reference is synced, which does not support adapters: leave out lora, or synced")
        for name, reason in NOT_WITH_ADAPTERS.items():
            if self.lora and name in changed_fields(self):
                raise UserError(f"{name} is given with adapters, {reason}: leave it out")

    @classmethod
    def of(cls, **options: Any) -> FinetuneConfig:
        """Build a configuration from options as on the command line, where the fields of the method are passed like
        the other options: `FinetuneConfig.of(base="runs/mybook", method="dpo", beta=0.2, lora=16)`."""
        return fields.build(cls, with_method(options))

    @property
    def adapters(self) -> LoRA | None:
        """The low-rank adapters to train; None if the run trains the weights."""
        return self.lora if isinstance(self.lora, LoRA) else None

    @checked
    def peak_learning_rate(self, d_model: int) -> float:
        """Return the learning rate after the warm-up; by default a constant of the method divided by the model's width
        `d_model`."""
        return self.method.rate / d_model if self.learning_rate is None else self.learning_rate


def config_class(values: Mapping[str, Any]) -> type[RunConfig]:
    return FinetuneConfig if "method" in values else RunConfig


def with_method(options: Mapping[str, Any]) -> dict[str, Any]:
    """Move the options that are fields of the method into the method: method="dpo", beta=0.2 becomes method={"kind":
    "dpo", "beta": 0.2}, as FinetuneConfig takes it.

    Raises a UserError for an option that is given twice, or is a field of other methods only.
    """
    values, method = dict(options), options.get("method", "sft")
    table = fields.parse(method, "method") if isinstance(method, str) else fields.plain(method)
    kind = table.get("kind") if isinstance(table, Mapping) else None
    if kind not in Method.kinds:
        return values  # the constructor raises the error
    own = fields.hints(Method.kinds[kind])
    for name in [name for name in values if name in own]:
        if name in table:
            raise UserError(f"{name} is given both as an option and inside the method: leave out one of them")
        table = {**table, name: values.pop(name)}
    check_readers(values, Method.kinds[kind])
    return {**values, "method": table}


def check_readers(options: Iterable[str], method: type[Method]) -> None:
    """Raise a UserError if one of the option names in `options` belongs only to other fine-tuning methods: a field of
    another method, and not a field of `method` or of FinetuneConfig."""
    known = fields.hints(FinetuneConfig).keys() - {*FinetuneConfig.fixed} | fields.hints(method).keys()
    for name in options:
        readers = [kind for kind, other in Method.choices().items() if name in fields.hints(other)]
        if readers and name not in known:
            raise UserError(f"{name} is not an option of {method.kind}, but of {', '.join(readers)}: leave it out")
