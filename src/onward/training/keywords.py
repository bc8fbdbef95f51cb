"""Keyword arguments, for editors and type checkers. Written by `python -m support.keywords`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from onward.config.lora import Adapters
from onward.config.mixtures import MovingWeight
from onward.training.environments.environment import Environment
from onward.training.methods.method import Method
from onward.training.methods.reference import ReferenceModel
from onward.training.rewards.reward import Reward


class RunKeywords(TypedDict, total=False):
    validate_every: int
    validation_tokens: int
    evaluation_tokens: int
    evaluate_tasks: str
    task_limit: int
    keep: int
    spike: float
    track: str | Sequence[str]
    prompt: str
    device: str
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    compile: bool
    recompute: bool
    loss_chunk: int
    experts: Literal["auto", "loop", "grouped"]
    mesh: str
    optimizer: str
    loss: str
    learning_rate: float | None
    mup: int
    schedule: Literal["wsd", "cosine", "linear", "constant"]
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
    weights: Sequence[float | str | MovingWeight]
    tokenizer: str
    validation: str
    field: str
    encoding: str
    raw: bool
    repeated_lines: float
    pack: Literal["stream", "documents"]
    base: str
    preset: str
    model: Mapping[str, Any]
    imports: str | Sequence[str]
    steps: int
    time: str
    epochs: float
    batch_size: int
    accumulation: int
    seed: int


class FinetuneKeywords(TypedDict, total=False):
    method: str | Method
    columns: str
    ignore: str
    template: str
    length: int
    too_long: Literal["error", "cut", "drop"]
    packed: bool
    lora: int | str | Adapters | None
    first: Literal["", "merged", "frozen"]
    quantize: Literal["", "int8", "int4"]
    validate_every: int
    validation_tokens: int
    evaluation_tokens: int
    evaluate_tasks: str
    task_limit: int
    keep: int
    spike: float
    track: str | Sequence[str]
    prompt: str
    device: str
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    compile: bool
    recompute: bool
    experts: Literal["auto", "loop", "grouped"]
    mesh: str
    optimizer: str
    learning_rate: float | None
    schedule: Literal["wsd", "cosine", "linear", "constant"]
    warmup: float
    decay: float
    min_lr_ratio: float
    weight_decay: float
    beta1: float
    beta2: float
    clip: float
    balance_loss: float
    balance_bias: float
    average: float
    weights: Sequence[float | str | MovingWeight]
    validation: str
    imports: str | Sequence[str]
    steps: int
    time: str
    epochs: float
    batch_size: int
    accumulation: int
    seed: int
    lm_weight: float
    teacher: str
    mix: float
    temperature: float
    on_policy: float
    completion_length: int
    loss_chunk: int
    depth: int
    falloff: float
    units: int
    center: float
    label_smoothing: float
    z_loss: float
    reward: str | Reward | None
    samples: int
    kl: float
    iterations: int
    mask_truncated: bool
    environment: str | Environment | None
    replay: int
    scale: Literal["group", "batch", "none"]
    highest: float
    clip_low: float
    clip_high: float
    clip_worst: float | None
    reduction: Literal["grpo", "bnpo", "dr_grpo", "dapo"]
    beta: float
    reference: str | ReferenceModel
    tail: float
    normalized: bool
    discount: float
    gae_lambda: float
    value_weight: float
    tau_good: float
    tau_bad: float
    variant: Literal["zero", "down"]
    tau: float
    desirable: float
    undesirable: float
    gamma: float
