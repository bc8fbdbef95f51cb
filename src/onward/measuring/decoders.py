"""Models to measure, given by name: their config, and the decoder with the weights of a folder or, for a release or
preset, random weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from onward.api.folders import load
from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig
from onward.families import preset, presets
from onward.measuring.generation import Precision
from onward.model.decoder import Decoder
from onward.planning import releases
from onward.training.presets import PRESETS, decoder
from onward.transforms.quantize import quantize_model


def decoder_of(model: str, vocab_size: int) -> DecoderConfig:
    """Return the config of the model to measure: `model` is a published release, a folder, a config.json, a GGUF file,
    a name on the hub, or a training preset, which gets a vocabulary of `vocab_size` tokens. Reads no weights. Raises a
    UserError for any other name."""
    if model in PRESETS:
        return decoder(model, vocab_size, {})
    return releases.decoder_of(model, PRESETS)


def check_context(config: DecoderConfig, context: int) -> None:
    """Raise a UserError if `context`, a number of tokens, exceeds the context length of the config."""
    if context > config.context_length:
        raise UserError(f"context is {context:,}, and the model's is {config.context_length:,} tokens: lower it")


def has_random_weights(model: str) -> bool:
    """Return whether `model` names a published release or a training preset, whose architecture is measured with random
    weights; other models are loaded."""
    return model in presets() or model in PRESETS


def models_in(
    precisions: Sequence[Precision], model: str, device: torch.device, vocab_size: int, revision: str = ""
) -> Iterator[tuple[Precision, Decoder]]:
    """Yield (precision, model) for each precision in turn; only one model is in memory at a time. `model` is its name:
    a training preset gets a vocabulary of `vocab_size` tokens, a model on the hub is loaded at `revision`, a branch or
    commit."""
    for precision in precisions:
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        quantize = precision if precision in ("int8", "int4") else None
        if not has_random_weights(model):
            yield precision, load(model, dtype, device, quantize=quantize, revision=revision).model
            continue
        torch.manual_seed(0)
        config = decoder(model, vocab_size, {}) if model in PRESETS else preset(model).config
        made = Decoder(config).to(device, dtype).eval()
        if quantize is not None:
            quantize_model(made, quantize)
        yield precision, made
