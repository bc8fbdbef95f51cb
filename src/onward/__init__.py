"""Onward: decoder-only Transformer language models from understanding to use.

>>> lm = onward.load("runs/mybook")
>>> lm.generate("Once upon", max_new_tokens=50, temperature=0.8, seed=1)

Names are imported when they are first used, so that `import onward` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.data.windows import Batch, Windows
    from onward.errors import UserError
    from onward.generation.sampling import Sampling
    from onward.language_model import LanguageModel, load, save, train
    from onward.model.cache import Cache
    from onward.model.config import (
        Alibi,
        AttentionOnly,
        DecoderConfig,
        Experts,
        Gated,
        LayerNorm,
        Learned,
        NoNorm,
        NoPosition,
        Parallel,
        Plain,
        PostNorm,
        PreNorm,
        RMSNorm,
        Rotary,
        Sandwich,
        SelfAttention,
        SharedNorm,
        Sinusoidal,
    )
    from onward.model.decoder import Decoder
    from onward.text.tokenizer import Tokenizer, train_tokenizer
    from onward.training.loss import mean_loss
    from onward.training.trainer import StepConfig, StepPlan, Trainer

_HOME = {
    "errors": ["UserError"],
    "generation.sampling": ["Sampling"],
    "data.windows": ["Batch", "Windows"],
    "language_model": ["LanguageModel", "load", "save", "train"],
    "model.cache": ["Cache"],
    "model.config": [
        *["DecoderConfig", "Learned", "Sinusoidal", "Rotary", "Alibi", "NoPosition", "SelfAttention"],
        *["Plain", "Gated", "Experts", "LayerNorm", "RMSNorm", "NoNorm"],
        *["PreNorm", "PostNorm", "Sandwich", "Parallel", "SharedNorm", "AttentionOnly"],
    ],
    "model.decoder": ["Decoder"],
    "text.tokenizer": ["Tokenizer", "train_tokenizer"],
    "training.loss": ["mean_loss"],
    "training.trainer": ["StepConfig", "StepPlan", "Trainer"],
}
_MODULE = {name: f"onward.{module}" for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'onward' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return __all__
