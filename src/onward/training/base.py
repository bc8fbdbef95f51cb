"""The model that a run begins from, where it is one in a folder."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from onward.checkpoint.folder import load_model
from onward.hub import locate
from onward.model.decoder import Decoder
from onward.text.templates import with_template
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.finetuning import FinetuneConfig


def load_base(config: RunConfig) -> tuple[Decoder, dict[str, Any]]:
    """The model that `config.base` names, in fp32, with a row of its embedding for each token of `base_tokenizer`;
    and its config.json."""
    model, hf = load_model(locate(config.base), torch.float32)
    size = base_tokenizer(config).vocab_size
    return (model if size <= model.config.vocab_size else with_vocabulary(model, size)).train(), hf


def base_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of the model that `config.base` names, with the chat template that is asked for."""
    tokenizer = Tokenizer.load(locate(config.base))
    named = config.template if isinstance(config, FinetuneConfig) else ""
    return with_template(tokenizer, named) if named else tokenizer


@torch.no_grad()
def with_vocabulary(model: Decoder, size: int) -> Decoder:
    """A copy of the model with a larger vocabulary. The embeddings of new tokens are the mean of the others, and so are
    their rows of the head, so that no new token is likelier than a known one is on average."""
    grown = Decoder(replace(model.config, vocab_size=size)).to(model.dtype)
    old, known = dict(model.named_parameters()), model.config.vocab_size
    for name, parameter in grown.named_parameters():
        parameter[:known].copy_(old[name]) if parameter.shape != old[name].shape else parameter.copy_(old[name])
        if parameter.shape != old[name].shape:
            nn.init.zeros_(parameter[known:]).add_(old[name].mean(0))
    return grown
