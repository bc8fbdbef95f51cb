"""The configuration of fine-tuning: that of a run, with a model to begin from and a method. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from onward.arguments import Range, check_fields, checked, named, shown
from onward.config.part_types import Rate, Size, SizeOrZero
from onward.errors import UserError
from onward.fields import changed_fields, docs
from onward.training.config import NotNegative, RunConfig, Share

Positive = Annotated[float, Range(1e-6, 1e6)]
MethodName = Literal[
    "sft",
    "dpo",
    "ipo",
    "hinge",
    "robust",
    "kto",
    "orpo",
    "simpo",
    "reward",
    "classify",
    "distill",
    "grpo",
    "rloo",
    "ppo",
]
Reduction = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
LEARNING_RATES = {  # the default, times 1 / d_model; pre-training has 0.5
    **dict.fromkeys(("sft", "reward", "classify", "distill"), 0.05),
    **dict.fromkeys(("orpo", "grpo", "rloo", "ppo"), 0.02),
}
REWARDED = "grpo", "rloo", "ppo"  # methods that sample completions and need a reward
COMPARED = "dpo", "ipo", "hinge", "robust", "kto"  # methods that compare the model with a reference
PREFERENCES = (*COMPARED, "orpo", "simpo")


@dataclass(frozen=True)
class Readers:
    """The runs that read an option: runs of these methods, with one of the options `given`."""

    options: tuple[str, ...]
    methods: tuple[str, ...] = get_args(MethodName)
    given: tuple[str, ...] = ()

    def include(self, config: FinetuneConfig) -> bool:
        """Whether the run of a configuration reads the option."""
        others = not self.given or any(getattr(config, name) for name in self.given)
        return config.method in self.methods and others

    def __str__(self) -> str:
        methods = "runs" if self.methods == get_args(MethodName) else ", ".join(self.methods)
        return methods + (f" with {' or '.join(self.given)}" if self.given else "")


ADAPTERS = "lora", "dora"
READERS = (  # options that some runs do not read; all runs read the others
    Readers(("label_smoothing",), ("sft", "dpo", "robust", "simpo")),
    Readers(("z_loss",), ("sft",)),
    Readers(("loss_chunk",), ("sft", "distill")),
    Readers(("beta",), PREFERENCES),
    Readers(("gamma",), ("simpo",)),
    Readers(("desirable", "undesirable"), ("kto",)),
    Readers(("reference",), COMPARED),
    Readers(("center",), ("reward",)),
    Readers(("lm_weight",), ("classify",)),
    Readers(("teacher", "mix", "on_policy"), ("distill",)),
    Readers(("temperature",), ("distill", *REWARDED)),
    Readers(("completion_length",), REWARDED),
    Readers(("completion_length",), ("distill",), ("on_policy",)),
    Readers(("reward", "samples", "kl", "clip_low", "clip_high", "iterations"), REWARDED),
    Readers(("reduction",), ("grpo",)),
    Readers(("discount", "gae_lambda", "value_weight"), ("ppo",)),
    Readers(("lora_alpha", "lora_targets", "rslora", "quantize"), given=ADAPTERS),
    Readers(("lora_dropout",), tuple(m for m in get_args(MethodName) if m not in PREFERENCES), ADAPTERS),
)
REQUIRED = {"teacher": ("distill",), "reward": REWARDED}
NOT_WITH_ADAPTERS = {"average": "which are not averaged", "balance_bias": "beside which routers stay as they are"}


@dataclass(frozen=True)
class MethodOptions:
    """The method and its options. docs/finetuning.md describes the data that each method needs."""

    method: MethodName = "sft"  # how the model learns from the examples
    template: str = ""  # chat template: chatml, llama3, mistral, gemma, plain or a file; "": the model's own
    length: SizeOrZero = 0  # the most tokens of an example; 0: the model's context length, at most 4096
    too_long: Literal["error", "cut", "drop"] = "error"  # of a longer example, cut keeps the first tokens
    packed: bool = True  # as many examples in a row as fit, none of which sees another
    beta: NotNegative = 0.1  # strength with which preferences hold the model to the reference
    gamma: NotNegative = 0.5  # margin that simpo asks for
    desirable: NotNegative = 1.0  # weight of wanted answers, in kto
    undesirable: NotNegative = 1.0  # weight of other answers, in kto
    center: NotNegative = 0.0  # weight of the squared sum of a pair's rewards, which keeps rewards around 0
    lm_weight: NotNegative = 0.5  # weight of the cross-entropy of the text beside that of the label, in classify
    teacher: str = ""  # the model to learn from, in distill: its folder or its name on the hub
    mix: Share = 0.0  # divergence of distill: 0 forward, 1 reverse, between Jensen-Shannon
    temperature: Positive = 1.0  # by which logits are divided in distill, grpo, rloo and ppo
    on_policy: Share = 0.0  # share of the batches of distill whose answers the student writes itself
    reference: Literal["online", "kept"] = "online"  # kept: its log-probabilities are computed once, before training
    reward: str = ""  # such as exact, number + 0.2 * length(tokens=50), FILE.py:FUNCTION or a reward model's folder
    samples: Annotated[int, Range(2, 4096)] = 8  # completions of each prompt, of grpo, rloo and ppo
    completion_length: Size = 256  # the most tokens of a completion that the model writes itself
    reduction: Reduction = "dapo"  # what the mean loss of grpo is over: dapo all tokens, grpo completions
    kl: NotNegative = 0.0  # weight of the KL divergence from the model at the start
    clip_low: Annotated[float, Range(0, 1)] = 0.2  # ratios of probabilities are clipped to 1 - clip_low
    clip_high: Annotated[float, Range(0, 100)] = 0.2  # and to 1 + clip_high
    iterations: Size = 1  # steps that use the same completions
    discount: Share = 1.0  # of the rewards of later tokens, in ppo
    gae_lambda: Share = 0.95  # of generalized advantages, in ppo: 0 trusts the values, 1 the rewards
    value_weight: NotNegative = 0.5  # weight of the loss of the values, in ppo
    full: bool = False  # train all weights, which is the default without lora and dora
    lora: SizeOrZero = 0  # rank of adapters (LoRA) to train in place of the weights; 0: none
    lora_alpha: NotNegative = 0.0  # the change is scaled by lora_alpha / rank; 0: twice the rank
    lora_targets: tuple[str, ...] = ("blocks",)  # parts of the names of the weights to adapt, such as attn.q or mlp
    lora_dropout: Rate = 0.0  # of the adapters' inputs
    rslora: bool = False  # scale by lora_alpha over the root of the rank
    dora: bool = False  # adapters that learn the norms of rows as well (DoRA); of rank 16 unless lora names another
    quantize: Literal["", "int8", "int4"] = ""  # keep the frozen weights under the adapters as integers (QLoRA)


@named
@dataclass(frozen=True)
class FinetuneConfig(RunConfig, MethodOptions):
    """Everything that determines what fine-tuning computes. A UserError for values out of range."""

    fixed: ClassVar[tuple[str, ...]] = ("weights", "tokenizer", "field", "encoding", "pack", "preset", "model", "mup")

    optimizer: str = "adamw"  # adamw, muon (for matrices, AdamW for the rest) or module:Class of a library
    weight_decay: NotNegative = 0.0  # of matrices; norms and biases have none
    out: str = ""  # folder of the run; "": runs/ and the names of the model and the method

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.steps or self.time or self.epochs):
            object.__setattr__(self, "epochs", 1.0)
        super().__post_init__()
        if self.label_smoothing >= 0.5 and self.method == "robust":
            raise UserError(f"label_smoothing is {self.label_smoothing}: of robust, it must be below 0.5")
        if not self.beta and self.method in PREFERENCES and self.method != "orpo":
            raise UserError(f"beta is 0, and {self.method} would learn nothing: give it a number above 0")
        if not self.base:
            raise UserError("no model to fine-tune: name its folder")
        for name, methods in REQUIRED.items():
            if self.method in methods and not getattr(self, name):
                raise UserError(f"{name} is missing, which {self.method} needs: {docs(MethodOptions)[name]}")
        if self.full and self.rank:
            raise UserError(f"full and {'lora' if self.lora else 'dora'} are both given: choose one")
        changed = changed_fields(self)
        for name, reason in NOT_WITH_ADAPTERS.items():
            if name in changed and self.rank:
                raise UserError(f"{name} is given with adapters, {reason}: leave it out")
        for name in changed:
            readers = [one for one in READERS if name in one.options]
            if readers and not any(one.include(self) for one in readers):
                known = ", and ".join(map(str, readers))
                raise UserError(
                    f"{name} is {shown(changed[name])}, which this run does not read: leave it out, it is for {known}"
                )

    @property
    def rank(self) -> int:
        """The rank of the adapters; 0: none."""
        return self.lora or 16 * self.dora

    @checked
    def peak_learning_rate(self, d_model: int) -> float:
        """The learning rate after the warm-up."""
        return LEARNING_RATES.get(self.method, 0.005) / d_model if self.learning_rate is None else self.learning_rate


def config_class(values: Mapping[str, Any]) -> type[RunConfig]:
    """The class of the configuration in a run.json."""
    return FinetuneConfig if "method" in values else RunConfig
