"""Parameters, operations, memory and scaling laws of a decoder, computed from its configuration."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.planning.fits import RunPoint, Unreliable, fit_loss, fit_power
    from onward.planning.flops import (
        attention_flops,
        causal_attention_flops,
        flops_per_token,
        part_sizes,
        training_flops,
        weight_flops,
    )
    from onward.planning.laws import LAWS, REFIT, LossLaw, flops_for, smaller_models
    from onward.planning.machine import peak_flops
    from onward.planning.memory import cache_bytes, generation_memory, training_memory, weight_bytes
    from onward.planning.parameters import active_parameters, cache_bytes_per_token, state_bytes
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "LAWS",
    "REFIT",
    "LossLaw",
    "RunPoint",
    "Unreliable",
    "active_parameters",
    "attention_flops",
    "cache_bytes",
    "cache_bytes_per_token",
    "causal_attention_flops",
    "fit_loss",
    "fit_power",
    "flops_for",
    "flops_per_token",
    "generation_memory",
    "part_sizes",
    "peak_flops",
    "smaller_models",
    "state_bytes",
    "training_flops",
    "training_memory",
    "weight_bytes",
    "weight_flops",
]
