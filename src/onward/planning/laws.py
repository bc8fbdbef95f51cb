"""Scaling laws: the loss of a model of N parameters after D tokens, and the best N and D for C = 6 N D operations.

Chinchilla: Hoffmann et al., "Training Compute-Optimal Large Language Models" (arXiv:2203.15556), whose three approaches
are the envelope of training curves, IsoFLOP profiles, and a fit of L(N, D). Its third approach was fitted again on the
same runs: Besiroglu et al., "Chinchilla Scaling: A replication attempt" (arXiv:2404.10102). Kaplan: Kaplan et al.,
"Scaling Laws for Neural Language Models" (arXiv:2001.08361), which counts parameters without embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FITTED = 6e18, 3e21  # FLOPs of the runs of Chinchilla's IsoFLOP profiles; outside, every law is an extrapolation
MIDDLE = math.sqrt(FITTED[0] * FITTED[1])
PF_DAY = 8.64e19  # FLOPs in a day at 10 ** 15 per second


@dataclass(frozen=True)
class LossLaw:
    """A scaling law of the loss: L(N, D) = E + A / N ** alpha + B / D ** beta in nats per token, for N parameters and D
    training tokens (Chinchilla, equation 2)."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Compute the loss of a model of `parameters` parameters after `tokens` training tokens, in nats per token."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """Compute the (parameters, tokens) with the least loss for `flops` operations, C = 6 N D (Chinchilla, equation
        4)."""
        total = self.alpha + self.beta
        g = (self.alpha * self.A / (self.beta * self.B)) ** (1 / total)
        return g * (flops / 6) ** (self.beta / total), (flops / 6) ** (self.alpha / total) / g

    def tokens_for(self, parameters: float, loss: float) -> float:
        """Training tokens after which a model with this many parameters reaches `loss`; infinity if it never does."""
        left = loss - self.E - self.A / parameters**self.alpha
        return (self.B / left) ** (1 / self.beta) if left > 0 else math.inf


@dataclass(frozen=True)
class Frontier:
    """A law of the best model size: N = scale * C ** exponent for C training operations, on C / (6 N) tokens."""

    scale: float
    exponent: float

    def optimum(self, flops: float) -> tuple[float, float]:
        parameters = self.scale * flops**self.exponent
        return parameters, flops / (6 * parameters)


@dataclass(frozen=True)
class Law:
    """A published scaling law; `exponents` are the 10th and 90th percentiles of the exponent in N ~ C ** exponent."""

    name: str
    source: str
    law: LossLaw | Frontier
    exponents: tuple[float, float] | None = None

    def optimum(self, flops: float) -> tuple[float, float]:
        return self.law.optimum(flops)

    def range(self, flops: float) -> tuple[float, float] | None:
        """Range of the best size for both ends of the exponent's interval, through the best size in the middle of the
        fitted runs."""
        if self.exponents is None:
            return None
        middle = self.optimum(MIDDLE)[0]
        sizes = sorted(middle * (flops / MIDDLE) ** exponent for exponent in self.exponents)
        return sizes[0], sizes[1]


# The constants of approach 3 are from the paper's LaTeX source, since the two digits in print give other optima.
CHINCHILLA = LossLaw(math.exp(0.5267228), math.exp(6.0073404), math.exp(6.0179186), 0.33917084, 0.2849083)
REFIT = LossLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
NEWEST = Law("re-fit of 2024", "fit of L(N, D) to the same runs", REFIT, (0.487, 0.539))
LAWS = (
    Law("Chinchilla 1", "training curves (through the rows of table 3)", Frontier(0.09916, 0.49810), (0.488, 0.502)),
    Law("Chinchilla 2", "IsoFLOP profiles (through the rows of table A3)", Frontier(0.14488, 0.48994), (0.462, 0.534)),
    Law("Chinchilla 3", "fit of L(N, D)", CHINCHILLA, (0.454, 0.455)),
    NEWEST,
    Law("Kaplan", "without embeddings, and one learning rate schedule", Frontier(1.3e9 / PF_DAY**0.73, 0.73)),
)


def flops_for(law: Law, *, parameters: float | None = None, tokens: float | None = None) -> float:
    """Find the operations for which a law's best size is `parameters` or, if that is None, its best number of tokens is
    `tokens`."""
    low, high = 0.0, 60.0  # powers of ten that bracket the solution
    place, wanted = (0, parameters) if parameters is not None else (1, tokens)
    assert wanted is not None
    for _ in range(100):
        middle = (low + high) / 2
        if law.optimum(10**middle)[place] < wanted:
            low = middle
        else:
            high = middle
    return 10**low


@dataclass(frozen=True)
class Optimum:
    """The best model for an amount of computation, by one law."""

    law: str
    flops: float
    parameters: float
    range: tuple[float, float] | None  # range of parameters; see Law.range
    tokens: float
    tokens_per_parameter: float
    loss: float | None  # nats per token; None for a law that predicts only sizes
    source: str
    extrapolated: bool  # whether flops lies outside FITTED


def optimum(law: Law, flops: float) -> Optimum:
    parameters, tokens = law.optimum(flops)
    loss = law.law.loss(parameters, tokens) if isinstance(law.law, LossLaw) else None
    outside = not FITTED[0] <= flops <= FITTED[1]
    sizes = law.range(flops)
    return Optimum(law.name, flops, parameters, sizes, tokens, tokens / parameters, loss, law.source, outside)


@dataclass(frozen=True)
class Smaller:
    """A model that is at most as large as the compute-optimal one and reaches the same loss."""

    parameters: float
    tokens: float
    training: float  # FLOPs of training
    answering: float  # FLOPs of the tokens that the model will read and write: 2 N for each

    @property
    def total(self) -> float:
        return self.training + self.answering


SHARES = 1.0, 0.7, 0.5, 0.35, 0.25


def smaller_models(law: LossLaw, flops: float, answered: float) -> list[Smaller]:
    """List the model of the best size for `flops` training operations by `law`, and smaller models that reach the same
    loss with more tokens. Each has the operations of its training and of its later use for `answered` tokens (read or
    generated)."""
    best, tokens = law.optimum(flops)
    loss = law.loss(best, tokens)
    sizes = [(share * best, law.tokens_for(share * best, loss)) for share in SHARES]
    return [Smaller(n, d, 6 * n * d, 2 * n * answered) for n, d in sizes if math.isfinite(d)]
