"""The configs of adapters: the rank of LoRA, the adapted weights, their initialization, and variants. Does not import
torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.base.fields import Part
from onward.config.part_types import OwnMethod
from onward.config.ranges import Rate, Size, SizeOrZero


class Adapters(Part):
    """Base class of adapters, such as `LoRA`: small weights that are added to a model and trained in place of the
    model's own weights."""

    @classmethod
    def shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        """Expand a rank given alone as an int or text, such as 16, to the table {"kind": "lora", "rank": 16}; return
        None for other values. Called when a configuration is read."""
        rank = type(value) is int or (isinstance(value, str) and value.isdecimal())
        return {"kind": LoRA.kind, "rank": int(value)} if rank else None


class Initialization(Part):
    """Base class of initializations: the initial values of A and B, the two factors of a low-rank adapter.

    A subclass of your own defines `factors(weight, rank, scaling)`, which returns A (R, I) and B (O, R) for a weight
    (O, I); the product B A times scaling is subtracted from the weight, so that the model begins unchanged. Onward's
    initializations are computed in `transforms/`.
    """

    factors: ClassVar[OwnMethod] = None


@dataclass(frozen=True)
class PiSSA(Initialization, kind="pissa"):
    """A and B contain the largest singular values of the weight and their singular vectors (Meng et al. 2024). The
    product of A and B is subtracted from the weight, so that the model begins unchanged."""

    iterations: SizeOrZero = 0  # iterations of a randomized SVD for large weights (16 is usual); 0: an exact SVD


@dataclass(frozen=True)
class OLoRA(Initialization, kind="olora"):
    """A and B contain the first rows and columns of a QR decomposition of the weight (Büyükakyüz 2024). Their product
    is subtracted from the weight, as in PiSSA."""


@dataclass(frozen=True)
class EVA(Initialization, kind="eva"):
    """A contains the directions in which the inputs of the layer vary most on the first batches of the run, and B is 0
    (Paischer et al. 2024). Ranks are distributed over the layers: the directions that explain the largest shares of
    variance are chosen, and the sum of all ranks stays the same."""

    rho: Annotated[float, Range(1, 1000)] = 2.0  # maximum rank of a layer, as a multiple of `rank`; 1: equal ranks
    tau: Annotated[float, Range(0, 1)] = 0.99  # stop at this cosine similarity of directions in consecutive batches
    whiten: bool = False  # divide directions by the square root of their singular values


@dataclass(frozen=True)
class LoRA(Adapters, kind="lora"):
    """Low-rank adapters for the weights that match `targets` (Hu et al. 2021): W + B A alpha / rank, where A and B are
    trained in place of W.

    A target is a part of a weight's dotted name: "q" and "attn.q" match the queries of all layers, "mlp" all weights of
    the feed-forwards including stacks of experts, "blocks.0" those of the first block, "head" the head.
    """

    rank: Size = 16  # number of rows of A and of columns of B
    alpha: Annotated[float, Range(1e-6, 1e6)] | None = None  # the change is B A alpha / rank; none: twice the rank
    targets: tuple[str, ...] = ("blocks",)  # weights to adapt, as parts of their names, such as attn.q or mlp
    ranks: Mapping[str, SizeOrZero] = field(default_factory=dict)  # other ranks, by parts of names; 0: no adapter
    dropout: Rate = 0.0  # dropout of the adapters' inputs; stacks of experts and embeddings have none
    rslora: bool = False  # divide alpha by the square root of the rank (Kalajdzievski 2023)
    dora: bool = False  # learn the norm of each row as well (DoRA, Liu et al. 2024)
    init: Initialization | None = None  # initialization of A and B; none: A is random and B is 0
    b_rate: Annotated[float, Range(1e-6, 1e6)] = 1.0  # factor of the learning rate for B and vectors (LoRA+: 16)
    full: tuple[str, ...] = ()  # modules to train fully, such as head or norm
    bias: Literal["none", "lora_only", "all"] = "none"  # biases to train: none, the biases of adapted layers, or all
    tokens: tuple[SizeOrZero, ...] = ()  # ids of tokens whose embeddings are also trained

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise UserError("targets are empty: name weights to adapt, such as attn.q")

    def scaling_of(self, rank: int) -> float:
        """Return the factor of B A for an adapter whose rank r, the argument `rank`, may differ from the field `rank`,
        R: alpha r / R, divided by r or, with rslora, by the square root of r."""
        alpha = (2.0 * self.rank if self.alpha is None else self.alpha) * rank / self.rank
        return alpha / (math.sqrt(rank) if self.rslora else rank)
