"""The shape of a model to train: sizes of our own, and how fields of a decoder are changed. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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


def decoder(preset: str, vocab_size: int, changes: dict[str, Any]) -> DecoderConfig:
    """A release or, in a size of our own, Qwen 3's shape, for a vocabulary and with some fields changed."""
    if preset in PRESETS:
        base = DecoderConfig(vocab_size=vocab_size, **SHAPE, **PRESETS[preset])
    else:
        base = families.preset(preset).config
    config = resize(base, {"vocab_size": vocab_size} | changes)
    if config.vocab_size < vocab_size:
        raise UserError(f"model.vocab_size is {config.vocab_size}, and the tokenizer has {vocab_size} tokens: raise it")
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
