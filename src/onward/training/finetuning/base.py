"""The base model of a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onward.checkpoint.load import load_model, open_source
from onward.checkpoint.peft.bases import BaseModel, is_adapter, weights_checksum
from onward.errors import UserError
from onward.hub import locate
from onward.model.decoder import Decoder
from onward.text.templates import with_template
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.finetuning.config import FinetuneConfig
from onward.training.methods.method import Base
from onward.transforms.heads import add_head, head_labels
from onward.transforms.lora import adapter_names, add_lora
from onward.transforms.quantize import is_quantized


def load_base(config: RunConfig) -> tuple[Decoder, dict[str, Any]]:
    """The model named by `config.base`, in fp32, and its config.json. Its embedding has a row for each token of
    `base_tokenizer`, and it has new adapters if the configuration asks for them."""
    c = config if isinstance(config, FinetuneConfig) else None
    adapters = c.adapters if c else None
    model, hf = load_model(locate(config.base), torch.float32, quantize=(c.quantize or None) if c else None)
    if is_quantized(model) and not adapters:
        raise UserError(
            f"{config.base} has quantized weights, which are not trained: train adapters on it with onward finetune "
            "--lora 16, or begin from the model that was quantized"
        )
    new = base_tokenizer(config).vocab_size - model.config.vocab_size
    if new > 0 and c and adapters:
        raise UserError(
            f"template {c.template} adds {new} tokens to the vocabulary, which adapters do not train: choose one "
            "without new tokens, such as plain, or leave out lora"
        )
    if new > 0:
        model = with_vocabulary(model, model.config.vocab_size + new)
    if adapters:
        torch.manual_seed(config.seed)
        add_lora(model, adapters)
    return model.train(), hf


def base_model(folder: Path, config: RunConfig, labels: Sequence[str]) -> Callable[[], Decoder] | None:
    """For a run that saves only adapters, a function that makes its model with new adapters and, given labels, a new
    head; else None."""

    def make() -> Decoder:
        model, _ = load_base(config)
        if labels:
            add_head(model, labels)
        return model

    return make if is_adapter(folder) else None


def adapter_base(config: RunConfig, model: Decoder) -> BaseModel | None:
    """The base of a model with adapters, with its checksum; None for other models."""
    if not adapter_names(model):
        return None
    if not config.base:
        raise UserError("the model has adapters, and a run saves these alone: name their base as base, with lora")
    return BaseModel(config.base, weights_checksum(locate(config.base)))


def base_of(config: FinetuneConfig) -> Base:
    """The model that a run begins from, for the loss of its method."""
    return Base(lambda: load_base(config)[0], lambda: base_tokenizer(config), config.device)


def base_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of the model named by `config.base`, with the configured chat template."""
    tokenizer = open_source(locate(config.base)).required_tokenizer()
    named = config.template if isinstance(config, FinetuneConfig) else ""
    return with_template(tokenizer, named) if named else tokenizer


@torch.no_grad()
def with_vocabulary(model: Decoder, size: int) -> Decoder:
    """A copy of the model with a larger vocabulary. Embeddings of new tokens are the mean of the others, and so are
    their rows of the head, so that a new token is about as likely as a known one."""
    grown = Decoder(replace(model.config, vocab_size=size)).to(model.dtype)
    if labels := head_labels(model):
        add_head(grown, labels)
    old, known = dict(model.named_parameters()), model.config.vocab_size
    for name, parameter in grown.named_parameters():
        parameter[:known].copy_(old[name]) if parameter.shape != old[name].shape else parameter.copy_(old[name])
        if parameter.shape != old[name].shape:
            nn.init.zeros_(parameter[known:]).add_(old[name].mean(0))
    return grown
