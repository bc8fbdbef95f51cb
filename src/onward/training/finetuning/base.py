"""The base model of a run: a model, or an adapter together with its model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.base.files import file_sha256
from onward.checkpoint.draft_heads import identity, is_draft_head
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.lazy import load_outline
from onward.checkpoint.load import load_model, open_source
from onward.checkpoint.peft.adapters import TENSORS, load_adapter
from onward.checkpoint.peft.bases import BaseModel, base_folder, check_base, weights_checksum
from onward.config.decoder import DecoderConfig
from onward.hub.folder import is_adapter, locate
from onward.model.adapters import adapter_names
from onward.model.decoder import Decoder
from onward.model.deferred import defer, values
from onward.text.templates import with_template
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.finetuning.config import FinetuneConfig
from onward.training.losses.answers import FIRST, START
from onward.training.methods.method import Base
from onward.transforms.draft_head import has_draft_head
from onward.transforms.heads import add_head, head_labels
from onward.transforms.lora import add_adapters, fully_trained, merge_lora, on_top
from onward.transforms.quantize import is_quantized

MERGED = "base"  # subfolder of a run for the model with its first adapter merged


def load_base(config: RunConfig, *, lazy: bool = False) -> tuple[Decoder, dict[str, Any]]:
    """Load the model named by `config.base` in fp32; return it with the content of its Hugging Face config.json. The
    model's embedding has a row for each token of `base_tokenizer`, and the adapters that the run trains are added, not
    yet initialized. With `lazy`, for processes that shard the model, the weights of the model are deferred, those of
    the adapters are not (see `load_outline`).

    If the base is itself an adapter, the run trains this adapter, with a frozen copy of it as the reference model; or,
    if the configuration has new adapters, it trains these on top of it. Raises a UserError if the run would train
    quantized weights, or if the chat template adds tokens and not both embedding and head are trained.
    """
    c = config if isinstance(config, FinetuneConfig) else None
    adapters, first = (c.adapters, locate(c.base)) if c else (None, None)
    folder, quantize = weights_folder(config), (c.quantize or None) if c else None
    model, hf = load_outline(folder, torch.float32) if lazy else load_model(folder, torch.float32, quantize=quantize)
    first = first if first and is_adapter(first) else None
    beside = c is not None and c.method.beside
    if first and beside:
        raise UserError(
            f"Cannot train separate modules on the adapter {config.base}: merge it with onward merge, and "
            "name the merged model"
        )
    if is_quantized(model) and not (adapters or first or beside):
        raise UserError(
            f"Cannot train the quantized weights of {config.base}: train adapters on it with onward finetune "
            "--lora 16, or start from the original model"
        )
    new = base_tokenizer(config).vocab_size - model.config.vocab_size
    if new > 0 and c and beside:
        raise UserError(
            f"template {c.template} adds {new} tokens, and {c.method.kind} does not train the model: "
            "choose a template without new tokens, such as plain"
        )
    if new > 0 and c and (adapters or first):
        full = fully_trained(model, adapters) if adapters and not first and not is_quantized(model) else []
        if not {"embed", "head"} <= {*full}:
            raise UserError(
                f"template {c.template} adds {new} tokens to the vocabulary, which adapters do not train: choose a "
                "template without new tokens, such as plain, leave out lora, or train the embedding and the head of a "
                'model that is neither quantized nor an adapter: --lora "lora(rank=16, full=(embed, head))"'
            )
    if new > 0:
        model = with_vocabulary(model, model.config.vocab_size + new)
    torch.manual_seed(config.seed)
    if first:
        check_base(first, folder)
        load_adapter(model, first, hf, FIRST if adapters else START)
        if adapters:
            on_top(model, adapters, FIRST)
        else:
            model.requires_grad_(False)
            load_adapter(model, first, hf)
    elif adapters:
        add_adapters(model, adapters)
    elif c and beside:
        c.method.attach(model)
    return model.train(), hf


def weights_folder(config: RunConfig) -> Path:
    """Return the folder of the base model or, if the base is an adapter, the folder of the adapter's base; a model on
    the hub is downloaded."""
    folder = locate(config.base)
    return base_folder(folder) if is_adapter(folder) else folder


def base_config(config: RunConfig) -> DecoderConfig:
    """Return the configuration of the base model as it is stored; reads headers only."""
    return open_source(weights_folder(config)).outline().config


def with_merged_base(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of the run in `folder`, with its base replaced if the base is an adapter and the run
    trains new adapters on it: that adapter is merged into its model in fp32, and the result is saved in `folder` as the
    new base. With `config.first` "frozen" nothing is merged. Raises a UserError if `config.first` is given and the base
    is not an adapter."""
    if not isinstance(config, FinetuneConfig) or not config.adapters or not config.base:
        return config
    first = locate(config.base)
    if not is_adapter(first):
        if config.first:
            raise UserError(f"Cannot use first, because {config.base} is not an adapter: leave it out")
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


def base_model(
    folder: Path, config: RunConfig, labels: Sequence[str], *, lazy: bool = False
) -> Callable[[], Decoder] | None:
    """Return a function that loads the base of the run in `folder` again, with uninitialized adapters and, given
    `labels`, an output head for these labels; the caller then loads a save, which contains only the adapters, into this
    model. None for runs that save whole models. `lazy` is passed to `load_base`."""

    def make() -> Decoder:
        model, _ = load_base(config, lazy=lazy)
        if labels:
            add_head(model, labels)
        return model

    return make if is_adapter(folder) or is_draft_head(folder) else None


def adapter_base(config: RunConfig, model: Decoder) -> BaseModel | None:
    """Return the name and the checksum of the base model, which are saved with a model that has adapters or a draft
    head; None for other models. Raises a UserError if `config.base` is empty."""
    checksum = identity if has_draft_head(model) else weights_checksum
    if not (adapter_names(model) or has_draft_head(model)):
        return None
    if not config.base:
        raise UserError("Cannot save the adapters of this model without its base: give base and lora")
    folder = weights_folder(config)
    named = config.base if folder == locate(config.base) else str(folder)
    return BaseModel(named, checksum(folder))


def base_checksum(config: RunConfig) -> str:
    """Return a checksum of the initial weights of a run, including those of an adapter; reads the files."""
    checksum, folder = weights_checksum(weights_folder(config)), locate(config.base)
    return f"{checksum} {file_sha256(folder / TENSORS)[:16]}" if is_adapter(folder) else checksum


def base_of(config: FinetuneConfig) -> Base:
    """Return functions that load the base model and its tokenizer, for losses that need a second copy of it."""
    return Base(lambda lazy: load_base(config, lazy=lazy)[0], lambda: base_tokenizer(config), config.device)


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
    """Return a copy of the model with its vocabulary extended to `size` tokens. The embedding and output rows of new
    tokens are the mean of the other rows, so that a new token is about as likely as a known one. Deferred weights stay
    deferred."""
    with model.device:
        grown = Decoder(replace(model.config, vocab_size=size)).to(model.dtype)
    if labels := head_labels(model):
        add_head(grown, labels)
    old = dict(model.named_parameters())
    for name, parameter in grown.named_parameters():
        longer = partial(with_mean_rows, old[name], parameter.shape)
        defer(parameter, longer) if parameter.is_meta else parameter.copy_(longer())
    return grown


def with_mean_rows(parameter: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the values of a parameter, extended to `shape` along the first dimension, if necessary, by the mean of its
    rows."""
    rows = values(parameter)
    if rows.shape == shape:
        return rows
    return torch.cat([rows, rows.mean(0, keepdim=True).expand(shape[0] - len(rows), *shape[1:])])
