"""Models to measure, given by name: their config, and the decoder with its weights or, for a release or preset, random
weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from onward.api.folders import load
from onward.base.errors import UserError
from onward.checkpoint.load import open_source
from onward.config.decoder import DecoderConfig
from onward.families import preset, presets
from onward.hub.folder import is_adapter, locate
from onward.measuring.generation import Precision
from onward.model.decoder import Decoder
from onward.planning import releases
from onward.training.presets import PRESETS, decoder
from onward.transforms.quantize import quantize_model


def decoder_of(model: str, vocab_size: int) -> DecoderConfig:
    """Config of a release, a folder, a config.json, a GGUF file, a name on the hub, or a preset with `vocab_size`
    tokens; reads no weights."""
    if model in PRESETS:
        return decoder(model, vocab_size, {})
    return releases.decoder_of(model, PRESETS)


def check_context(config: DecoderConfig, context: int) -> None:
    if context > config.context_length:
        raise UserError(f"context is {context:,}: it must be at most the model's {config.context_length:,} tokens")


def has_random_weights(model: str) -> bool:
    # only the architecture of a release or preset is measured
    return model in presets() or model in PRESETS


def stored_precision(model: str, revision: str = "") -> Precision | None:
    """The precision of most weights that a folder stores as integers; None if it stores none, or for a release or
    preset. Reads headers and one row of each of these weights."""
    if has_random_weights(model) or is_adapter(folder := locate(model, revision)):
        return None
    readers = [tensor.quantized for tensor in open_source(folder).outline().stored.values() if tensor.quantized]
    counts: Counter[Precision] = Counter("int8" if read(0, 1)[1].ndim == 1 else "int4" for read in readers)
    return counts.most_common(1)[0][0] if counts else None


def models_in(
    precisions: Sequence[Precision], model: str, device: torch.device, vocab_size: int, revision: str = ""
) -> Iterator[tuple[Precision, Decoder]]:
    """Yield each precision with the model in it, one after another."""
    stored = stored_precision(model, revision)
    for precision in precisions:
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        quantize = precision if precision in ("int8", "int4") and precision != stored else None
        if not has_random_weights(model):
            yield precision, load(model, dtype, device, quantize=quantize, revision=revision).model
            continue
        torch.manual_seed(0)
        config = decoder(model, vocab_size, {}) if model in PRESETS else preset(model).config
        made = Decoder(config).to(device, dtype).eval()
        if quantize is not None:
            quantize_model(made, quantize)
        yield precision, made
