"""The fields of RunConfig as keyword arguments, so that editors complete them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from onward.config.lora import Adapters
from onward.config.mixtures import MovingWeight
from onward.training.methods import Method
from onward.training.methods.reference import ReferenceModel
from onward.training.reinforcement.policy_losses import AdvantageScale, Reduction
from onward.training.rewards import Reward


class CommonKeywords(TypedDict, total=False):
    """The keyword arguments that `onward.train` and `onward.finetune` share; see RunConfig for their meanings and
    defaults."""

    validate_every: int
    validation_tokens: int
    evaluation_tokens: int
    evaluate_tasks: str
    task_limit: int
    keep: int
    spike: float
    track: Sequence[str]
    prompt: str
    device: str
    mesh: str
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    compile: bool
    recompute: bool
    loss_chunk: int
    experts: Literal["auto", "loop", "grouped"]
    optimizer: str
    learning_rate: float | None
    schedule: Literal["cosine", "wsd", "linear", "constant"]
    warmup: float
    decay: float
    min_lr_ratio: float
    weight_decay: float
    beta1: float
    beta2: float
    clip: float
    label_smoothing: float
    z_loss: float
    balance_loss: float
    balance_bias: float
    average: float
    validation: str
    imports: Sequence[str]
    steps: int
    time: str
    epochs: float
    batch_size: int
    accumulation: int
    seed: int


class RunKeywords(CommonKeywords, total=False):
    """The keyword arguments of `onward.train`; see RunConfig for their meanings and defaults."""

    base: str
    weights: Sequence[float | MovingWeight]
    tokenizer: str
    field: str
    encoding: str
    pack: Literal["stream", "documents"]
    preset: str
    model: Mapping[str, Any]
    mup: int


class FinetuneKeywords(CommonKeywords, total=False):
    """The keyword arguments of `onward.finetune`: the fields of FinetuneConfig, and the options of the fine-tuning
    methods, such as `beta` of DPO."""

    method: str | Method
    columns: str
    ignore: str
    weights: Sequence[float | MovingWeight]
    template: str
    length: int
    too_long: Literal["error", "cut", "drop"]
    packed: bool
    lora: int | str | Adapters
    first: Literal["", "merged", "frozen"]
    quantize: Literal["", "int8", "int4"]
    beta: float
    reference: str | ReferenceModel
    tail: float
    normalized: bool
    variant: Literal["zero", "down"]
    tau: float
    gamma: float
    desirable: float
    undesirable: float
    center: float
    lm_weight: float
    teacher: str
    mix: float
    on_policy: float
    reward: str | Reward
    samples: int
    completion_length: int
    temperature: float
    kl: float
    iterations: int
    mask_truncated: bool
    scale: AdvantageScale
    reduction: Reduction
    clip_low: float
    clip_high: float
    clip_worst: float | None
    highest: float
    tau_good: float
    tau_bad: float
    discount: float
    gae_lambda: float
    value_weight: float
