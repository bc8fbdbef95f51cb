"""The fields of RunConfig as keyword arguments, so that editors complete them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class RunKeywords(TypedDict, total=False):
    """The keyword arguments of `onward.train`; see RunConfig for their meanings and defaults."""

    validate_every: int
    validation_tokens: int
    evaluation_tokens: int
    keep: int
    spike: float
    track: Sequence[str]
    prompt: str
    device: str
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
    weights: Sequence[float]
    tokenizer: str
    validation: str
    field: str
    encoding: str
    pack: Literal["stream", "documents"]
    preset: str
    model: Mapping[str, Any]
    imports: Sequence[str]
    steps: int
    time: str
    epochs: float
    batch_size: int
    accumulation: int
    seed: int
