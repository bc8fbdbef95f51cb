"""The estimated time of verifying draft tokens, by the kind of a model's weights."""

from __future__ import annotations

from onward.config.decoder import at
from onward.config.feedforward_parts import Experts
from onward.model.decoder import Decoder

COST = 0.06  # time of verifying a token, relative to a step; measured for dense models of 30 and 124 million parameters
EXPERTS = 0.5  # COST in a mixture of experts, where each token reads its own experts
INTEGERS = 0.3  # COST with integer weights, which fewer than four rows read one after the other


def cost_of(model: Decoder) -> float:
    """Return the estimated time of verifying one more token, relative to a step."""
    if has_integer_weights(model):
        return INTEGERS
    mlps = (at(model.config.mlp, layer) for layer in range(model.config.n_layers))
    return EXPERTS if any(isinstance(mlp, Experts) for mlp in mlps) else COST


def has_integer_weights(model: Decoder) -> bool:
    """Return whether layers of the last block are quantized: a matmul of four or more rows then rounds differently from
    one of fewer rows."""
    return any(hasattr(module, "precision") for module in model.blocks[-1].modules())
