"""The quantization error at the start of a run. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizationError:
    """The differences in weights and loss between a quantized base model and the original. Errors of weights are
    relative: the Frobenius norm of the difference divided by that of the original weights."""

    precision: str
    weights: float  # relative error of all quantized weights
    layer: str  # layer with the largest error
    greatest: float
    tokens: int  # number of tokens that both losses are computed on
    loss: float  # nats per token
    plain_loss: float

    def __str__(self) -> str:
        return (
            f"{self.precision} weights differ from the unquantized weights by {self.weights:.1%} (most in "
            f"{self.layer}, by {self.greatest:.1%}); the loss on {self.tokens:,} tokens is {self.loss:.4f}, with "
            f"unquantized weights {self.plain_loss:.4f}"
        )
