"""Adapters as values: the rank of LoRA, the weights that it adapts, and its variants. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from onward.arguments import Range
from onward.config.part_types import Rate, Size
from onward.errors import UserError
from onward.fields import Part


class Adapters(Part):
    """The type of adapters that are trained in place of the weights of a model."""

    @classmethod
    def shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        """Return a rank alone, such as 16, stands for lora(rank=16)."""
        rank = type(value) is int or (isinstance(value, str) and value.isdecimal())
        return {"kind": LoRA.kind, "rank": int(value)} if rank else None


@dataclass(frozen=True)
class LoRA(Adapters, kind="lora"):
    """Low-rank adapters for the weights that match `targets` (Hu et al. 2021): W + B A alpha / rank, of which A and B
    are trained.

    A target is a part of a weight's dotted name: "q" and "attn.q" match the queries of all layers, "mlp" all weights of
    the feed-forwards including stacks of experts, "blocks.0" those of the first block, "head" the head.
    """

    rank: Size = 16  # rows of A, and columns of B
    alpha: Annotated[float, Range(1e-6, 1e6)] | None = None  # the change is B A alpha / rank; none: twice the rank
    targets: tuple[str, ...] = ("blocks",)  # parts of the names of the weights to adapt, such as attn.q or mlp
    dropout: Rate = 0.0  # of the adapters' inputs; stacks of experts and embeddings have none
    rslora: bool = False  # divide alpha by the root of the rank (Kalajdzievski 2023)
    dora: bool = False  # learn the norm of each row as well (DoRA, Liu et al. 2024)
    full: tuple[str, ...] = ()  # modules that are trained whole, such as head or norm

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise UserError("targets are empty: name weights to adapt, such as attn.q")

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
