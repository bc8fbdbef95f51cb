"""The base model of a run: a model, or an adapter on one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.lazy import StoredWeights, load_outline
from onward.checkpoint.load import load_model, open_source
from onward.checkpoint.peft.adapters import TENSORS, load_adapter
from onward.checkpoint.peft.bases import BaseModel, base_folder, check_base, is_adapter, weights_checksum
from onward.errors import UserError
from onward.files import file_sha256
from onward.hub import locate
from onward.model.decoder import Decoder
from onward.text.templates import with_template
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.finetuning.config import FinetuneConfig
from onward.training.losses.answers import FIRST, START
from onward.training.methods.method import Base
from onward.transforms.heads import add_head, head_labels
from onward.transforms.lora import adapter_names, add_adapters, merge_lora, on_top
from onward.transforms.quantize import is_quantized

MERGED = "base"  # the folder in that of a run for the model with its first adapter merged


def load_base(config: RunConfig) -> tuple[Decoder, dict[str, Any]]:
    """Load the model named by `config.base`, in fp32, and the keys of its Hugging Face config.json. Its embedding has a
    row for each token of `base_tokenizer`, and it has the adapters that the run trains, not yet initialized.

    If the base is itself an adapter on a model, the run trains this adapter, and a frozen copy of it is the reference;
    or it trains new adapters on top, as `config.first` says. Raises a UserError for quantized weights to train, and for
    new tokens of the chat template that adapters do not train.
    """
    c = config if isinstance(config, FinetuneConfig) else None
    adapters, first = (c.adapters, locate(c.base)) if c else (None, None)
    model, hf = load_model(weights_folder(config), torch.float32, quantize=(c.quantize or None) if c else None)
    first = first if first and is_adapter(first) else None
    if is_quantized(model) and not (adapters or first):
        raise UserError(
            f"{config.base} has quantized weights, which are not trained: train adapters on it with onward finetune "
            "--lora 16, or begin from the model that was quantized"
        )
    new = base_tokenizer(config).vocab_size - model.config.vocab_size
    if new > 0 and c and (adapters or first):
        raise UserError(
            f"template {c.template} adds {new} tokens to the vocabulary, which adapters do not train: choose one "
            "without new tokens, such as plain, or leave out lora"
        )
    if new > 0:
        model = with_vocabulary(model, model.config.vocab_size + new)
    torch.manual_seed(config.seed)
    if first:
        check_base(first, weights_folder(config))
        load_adapter(model, first, hf, FIRST if adapters else START)
        if adapters:
            on_top(model, adapters, FIRST)
        else:
            model.requires_grad_(False)
            load_adapter(model, first, hf)
    elif adapters:
        add_adapters(model, adapters)
    return model.train(), hf


def base_outline(config: RunConfig) -> tuple[Decoder, StoredWeights, dict[str, Any]] | None:
    """Return the model named by `config.base` on the meta device, its stored weights in fp32, and the keys of its
    Hugging Face config.json, for processes that divide the model; None if the run trains adapters or adds tokens, which
    needs the whole model."""
    c = config if isinstance(config, FinetuneConfig) else None
    folder = locate(config.base)
    if is_adapter(folder) or (c and (c.adapters or c.quantize)):
        return None
    model, weights, hf = load_outline(folder, torch.float32)
    return None if base_tokenizer(config).vocab_size > model.config.vocab_size else (model.train(), weights, hf)


def weights_folder(config: RunConfig) -> Path:
    """Return the folder of the model named by `config.base` or, if that is an adapter, of the model beneath it. A model
    on the hub is downloaded."""
    folder = locate(config.base)
    return base_folder(folder) if is_adapter(folder) else folder


def with_merged_base(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of a run in `folder`, in which the base may be replaced: if the run trains new adapters
    on a base that is an adapter, and `config.first` is not "frozen", that adapter is merged into its model in fp32, and
    the result is written into the folder as the new base. Raises a UserError for an option `first` without such a
    base."""
    if not isinstance(config, FinetuneConfig) or not config.adapters or not config.base:
        return config
    first = locate(config.base)
    if not is_adapter(first):
        if config.first:
            raise UserError(f"first is {config.first!r}, and {config.base} is not an adapter: leave it out")
        return config
    if config.first == "frozen":
        return config
    model, hf = load_model(weights_folder(config), torch.float32)
    check_base(first, weights_folder(config))
    load_adapter(model, first, hf)
    merge_lora(model)
    save_model(model, folder / MERGED, hf)
    base_tokenizer(replace(config, template="")).save(folder / MERGED)
    return replace(config, base=str(folder / MERGED), first="")


def base_model(folder: Path, config: RunConfig, labels: Sequence[str]) -> Callable[[], Decoder] | None:
    """Return, for a run that saves only adapters, a function that makes its model anew, with uninitialized adapters
    and, given `labels`, a new output head for them, so that a save can be loaded into it; None for other runs."""

    def make() -> Decoder:
        model, _ = load_base(config)
        if labels:
            add_head(model, labels)
        return model

    return make if is_adapter(folder) else None


def adapter_base(config: RunConfig, model: Decoder) -> BaseModel | None:
    """Return the name and the checksum of the base of a model with adapters; None for a model without adapters. Raises
    a UserError if `config.base` is empty."""
    if not adapter_names(model):
        return None
    if not config.base:
        raise UserError("the model has adapters, and a run saves these alone: name their base as base, with lora")
    folder = weights_folder(config)
    named = config.base if folder == locate(config.base) else str(folder)
    return BaseModel(named, weights_checksum(folder))


def base_checksum(config: RunConfig) -> str:
    """Return a checksum of the weights that a run begins from, including those of an adapter; reads their files."""
    checksum, folder = weights_checksum(weights_folder(config)), locate(config.base)
    return f"{checksum} {file_sha256(folder / TENSORS)[:16]}" if is_adapter(folder) else checksum


def base_of(config: FinetuneConfig) -> Base:
    """Return functions that load the base model of a run and its tokenizer, for losses that need the model once more,
    such as DPO for its reference."""
    return Base(lambda: load_base(config)[0], lambda: base_tokenizer(config), config.device)


def base_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of the model named by `config.base`, with the configured chat template."""
    folder = locate(config.base)
    if is_adapter(folder) and not (folder / "tokenizer.json").exists():
        folder = base_folder(folder)
    tokenizer = open_source(folder).required_tokenizer()
    named = config.template if isinstance(config, FinetuneConfig) else ""
    return with_template(tokenizer, named) if named else tokenizer


@torch.no_grad()
def with_vocabulary(model: Decoder, size: int) -> Decoder:
    """Return a copy of the model with a vocabulary of `size` tokens. Embeddings and output rows of new tokens are the
    mean of the others, so that a new token is about as likely as a known one."""
    grown = Decoder(replace(model.config, vocab_size=size)).to(model.dtype)
    if labels := head_labels(model):
        add_head(grown, labels)
    old, known = dict(model.named_parameters()), model.config.vocab_size
    for name, parameter in grown.named_parameters():
        parameter[:known].copy_(old[name]) if parameter.shape != old[name].shape else parameter.copy_(old[name])
        if parameter.shape != old[name].shape:
            nn.init.zeros_(parameter[known:]).add_(old[name].mean(0))
    return grown
