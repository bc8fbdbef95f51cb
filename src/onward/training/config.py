"""What a training run is, as a value: data, model, and how to train. Does not import torch."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from onward import families, fields
from onward.errors import UserError
from onward.model.config import DecoderConfig, RMSNorm, SelfAttention

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "n_layers": 2, "n_heads": 4, "context_length": 128},
    "mini": {"d_model": 128, "n_layers": 3, "n_heads": 4, "context_length": 128},
    "small": {"d_model": 384, "n_layers": 6, "n_heads": 6, "context_length": 256},
    "medium": {"d_model": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 4, "context_length": 1024},
}
SHAPE: dict[str, Any] = {"attention": SelfAttention(qk_norm="head"), "norm": RMSNorm(eps=1e-6), "tied": True}


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes. A UserError tells of values out of range or in contradiction."""

    sources: tuple[str, ...] = ("embedded",)  # files, folders, globs, .jsonl, .gz, - (standard input), a corpus's name
    out: str = ""  # folder of the run; "": runs/ and the name of the first source
    tokenizer: str = "bpe:4096"  # char, byte, bpe:VOCABULARY, or the path of a tokenizer.json or model folder
    validation: str = "0.1"  # a file, the share at the end of the text, or none
    field: str = "text"  # the field of each .jsonl line that holds the text
    encoding: str = "utf-8"  # of the text files
    preset: str = "mini"  # tiny, mini, small, medium or a release (see `onward models`); --model.* changes its fields
    model: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of DecoderConfig that differ
    steps: int = 0  # optimiser steps; 0: as many as --time or --epochs allow
    time: str = ""  # how long to train, such as 100s, 5m or 2h; fixed to a number of steps after a short timing
    epochs: float = 0.0  # how often to see all of the training text
    batch_size: int = 8  # windows of context_length tokens in one forward and backward
    accumulation: int = 1  # batches whose gradients make one step
    learning_rate: float | None = None  # the highest, after the warm-up; none: 0.5 / d_model
    final_share: float = 0.05  # of the learning rate, at the end of the cosine
    warmup: float = 0.05  # share of the steps in which the learning rate rises
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    beta1: float = 0.9  # AdamW's decay of the mean of gradients
    beta2: float = 0.99  # AdamW's decay of the mean of squared gradients
    clip: float = 1.0  # the greatest norm of the gradient
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # bf16 computes products in bf16; auto takes the faster
    device: str = "auto"  # auto, cpu, cuda, mps
    compile: bool = False  # compile the blocks with torch.compile: a slow start, then faster steps
    seed: int = 0  # of the weights, the order of windows and dropout
    validate_every: int = 0  # steps between validations and saves; 0: twenty of them in the run
    validation_tokens: int = 16_384  # how much of the validation text is used during the run; at the end it is all
    prompt: str = ""  # continued again and again in the display; "": the beginning of the validation text

    def __post_init__(self) -> None:
        chosen = [name for name in ("steps", "time", "epochs") if getattr(self, name)]
        if len(chosen) > 1:
            raise UserError(f"{' and '.join(chosen)} are both given: choose one of steps, time and epochs")
        if not chosen:
            object.__setattr__(self, "time", "5m")
        if self.time:
            seconds(self.time)
        for name in ("batch_size", "accumulation", "validation_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("steps", "epochs", "learning_rate", "weight_decay", "clip", "validate_every"):
            if not 0 <= (getattr(self, name) or 0) < float("inf"):  # nan is not
                raise UserError(f"{name} is {getattr(self, name)}: it must be a number that is not negative")
        for name in ("final_share", "warmup", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name)}: it is a share, from 0 to 1")
        if abs(self.seed) >= 1 << 63:
            raise UserError(f"seed is {self.seed}: it must fit into 64 bits")
        if self.preset not in PRESETS and self.preset not in (known := families.presets()):
            close = fields.nearest(self.preset, {*PRESETS, *known})
            raise UserError(f"preset is {self.preset!r}, which `onward models` does not list: {close}")
        if not self.sources:
            raise UserError("no text to train on: name files or folders, or the corpus `embedded`")

    def decoder(self, vocab_size: int) -> DecoderConfig:
        """The model: a release or, in a size of our own, Qwen 3's shape, with the fields in `model` changed."""
        if self.preset in PRESETS:
            base = DecoderConfig(vocab_size=vocab_size, **SHAPE, **PRESETS[self.preset])
        else:
            base = families.preset(self.preset).config
        config = resize(base, {"vocab_size": vocab_size} | self.model)
        if config.vocab_size < vocab_size:
            raise UserError(
                f"model.vocab_size is {config.vocab_size}, and the tokenizer has {vocab_size} tokens: raise it"
            )
        return config


def resize(config: DecoderConfig, changes: dict[str, Any]) -> DecoderConfig:
    """The decoder with some of its fields, plain values or text, changed; a table without a kind changes fields of the
    part that is there.

    What followed from other sizes follows again unless it is among the changes: d_head from d_model and n_heads,
    n_kv_heads from n_heads, d_embed and a scale of the square root from d_model; d_ff keeps its ratio to d_model, as a
    multiple of 8.
    """
    values = merge(fields.plain(config), changes, "model")
    width = max(8, fields.convert(int, values["d_model"], "model.d_model"))
    followed = {
        "d_head": config.d_model / config.n_heads,
        "n_kv_heads": config.n_heads,
        "d_embed": config.d_model,
        "d_ff": replace(config, d_ff=0).d_ff,
    }
    follows: dict[str, Any] = {name: 0 for name, value in followed.items() if getattr(config, name) == value}
    if width != config.d_model:
        follows = {"d_ff": max(8, round(config.d_ff * width / config.d_model / 8) * 8)} | follows
        if config.embed_scale == config.d_model**0.5:
            follows["embed_scale"] = width**0.5
    return fields.build(DecoderConfig, values | {k: v for k, v in follows.items() if k not in changes}, "model")


def merge(base: dict[str, Any], over: dict[str, Any], where: str = "") -> dict[str, Any]:
    """`over` upon `base`, table by table; what is no table, or names a kind of part, replaces what is there."""
    result = dict(base)
    for name, value in over.items():
        there, path = base.get(name), f"{where}.{name}".strip(".")
        if isinstance(value, dict) and "kind" not in value:
            there = fields.parse(there, path) if isinstance(there, str) else there
            if isinstance(there, list):
                raise UserError(f"{path} is several parts: write {', '.join(value)} inside each of them")
            if isinstance(there, dict):
                value = merge(there, value, path)
        result[name] = value
    return result


def seconds(text: str) -> float:
    """A duration such as 100s, 5m, 2h or 100 in seconds."""
    match = re.fullmatch(r"(\d+\.?\d*)\s*([smh]?)", text.strip())
    if not match or float(match[1]) <= 0:
        raise UserError(f"time is {text!r}: write it like 100s, 5m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
