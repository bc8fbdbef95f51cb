"""Load a model whole in each evaluating process, or divided over the processes."""

from __future__ import annotations

from typing import TYPE_CHECKING
from warnings import catch_warnings

from onward.base.errors import UserError
from onward.cli.shared.loading import Loading, dtype_of, load

if TYPE_CHECKING:
    import torch

    from onward.api.language_model import LanguageModel
    from onward.config.decoder import DecoderConfig
    from onward.parallel.replicas import Replicas


def load_alike(model: str, loading: Loading, replicas: Replicas) -> LanguageModel:
    """Load the whole model or, if the mesh of `replicas` divides it, this process's part. Raises a UserError
    if the processes have loaded different weights."""
    lm = load_part(model, loading, replicas) if replicas.mesh.divides else load(model, loading)
    if replicas.mesh.count > 1:
        from onward.compiled.fingerprint import fingerprint

        replicas.together(f"{model} with weights {fingerprint(lm.model)!s:.8}", lambda: None)
    return lm


def load_part(model: str, options: Loading, replicas: Replicas) -> LanguageModel:
    """Load this process's part of `model` with `options`; a tensor axis of the mesh of `replicas` divides the model.
    Raises a UserError if `options` ask to quantize it."""
    from onward.api.language_model import LanguageModel
    from onward.checkpoint.divided import load_divided
    from onward.hub.folder import locate
    from onward.transforms.extend import extended

    if options.quantize:
        raise UserError(
            f"Cannot quantize a model that {str(replicas.mesh)!r} divides: leave quantize out, or use replicas only"
        )
    decoder, hf, source = load_divided(
        locate(model, options.revision),
        replicas.mesh,
        replicas.devices,
        dtype_of(options),
        adapter_folders=[locate(options.adapter_folder)] if options.adapter_folder else (),
        allow_nonfinite=options.allow_nonfinite,
    )
    if options.rope is not None:
        decoder.config = extended(decoder.config, options.rope)
    return LanguageModel(decoder, source.tokenizer(), hf)


def outline_of(model: str, options: Loading) -> tuple[DecoderConfig, torch.dtype]:
    """Return the configuration of `model` and the dtype of its weights, as `options` load them; reads headers only.
    Raises a UserError for quantized weights, which cannot be divided."""
    from onward.checkpoint.peft.adapters import load_with_adapters
    from onward.hub.folder import locate
    from onward.transforms.extend import extended

    with catch_warnings(action="ignore"):  # the model is loaded later, with the same warnings
        decoder, *_ = load_with_adapters(locate(model, options.revision), dtype=dtype_of(options), lazy=True)
    config = decoder.config
    return (extended(config, options.rope) if options.rope is not None else config), decoder.dtype
