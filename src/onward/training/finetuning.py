"""The configuration of fine-tuning: that of a run, with a model to begin from and a method. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from onward.arguments import Range, check_fields, checked, named
from onward.errors import UserError
from onward.model.part_types import Rate, Size, SizeOrZero
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


@dataclass(frozen=True)
class MethodOptions:
    """The method. What it needs in the data stands in docs/finetuning.md."""

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
    reward: str = ""  # exact, arithmetic, regex:PATTERN, length:N, json:FILE, FILE.py:FUNCTION or a reward model
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
        if bool(self.teacher) != (self.method == "distill"):
            given = "is given, which only" if self.teacher else "is not given, which"
            raise UserError(f"teacher {given} the method distill uses")
        if not self.base:
            raise UserError("no model to fine-tune: name its folder")
        if self.method in REWARDED and not self.reward:
            raise UserError(
                f"reward is missing, which {self.method} needs: exact, arithmetic, FILE.py:FUNCTION or a model"
            )
        if self.reward and self.method not in REWARDED:
            raise UserError(f"reward is given, which only the methods {', '.join(REWARDED)} use")
        if self.full and self.rank:
            raise UserError(f"full and {'lora' if self.lora else 'dora'} are both given: choose one")
        if self.quantize and not self.rank:
            raise UserError(f"quantize is {self.quantize}, and quantized weights are not trained: give lora as well")
        if self.average and self.rank:
            raise UserError("average is given with adapters, which are not averaged: leave it out")

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
