"""Differential attention, a choice of `DecoderConfig.attention`. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from onward.base.errors import UserError
from onward.config.block_parts import RMSNorm
from onward.config.part_types import Attention, ConfigFields, HeadSizes, Norm, each
from onward.config.position_parts import Alibi
from onward.config.ranges import BelowOne, SizeOrZero


@dataclass(frozen=True)
class DifferentialAttention(Attention, kind="differential"):
    """Pairs of heads: the attention weights of the second head, times a learned number lambda, are subtracted from
    those of the first; both heads attend to the same values, which are twice as wide as a key, and the result is
    normalized (Ye et al. 2024, "Differential Transformer", arXiv:2410.05258, section 2.1).

    lambda = exp(q1 . k1) - exp(q2 . k2) + lambda_init, with four learned vectors in each layer.
    """

    window: SizeOrZero = 0  # number of tokens that a token attends to, itself included; 0: all
    lambda_init: BelowOne | None = None  # lambda at the start; none: 0.8 - 0.6 exp(-0.3 layer)
    head_norm: Norm = RMSNorm(weight=False)  # the norm of the output of each pair of heads
    bias: bool = False  # whether the q, k and v projections have biases
    out_bias: bool = False  # whether the output projection has a bias
    n_heads: SizeOrZero = 0  # number of query heads, two for each pair; 0: the config's n_heads
    n_kv_heads: SizeOrZero = 0  # number of key heads, two for each head of values; 0: the config's n_kv_heads
    d_head: SizeOrZero = 0  # width of a query and a key; 0: the config's d_head

    sizes: ClassVar[tuple[str, ...]] = ("n_heads", "n_kv_heads", "d_head")

    def heads(self, config: ConfigFields) -> HeadSizes:
        """Return the sizes of the pairs of heads."""
        d_head = self.d_head or config.d_head
        n_heads, n_kv_heads = self.n_heads or config.n_heads, self.n_kv_heads or config.n_kv_heads
        return HeadSizes(n_heads // 2, n_kv_heads // 2, d_head, 2 * d_head)

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        _, pairs, width, d_value = self.heads(config)
        return {"k1": (pairs, width), "k2": (pairs, width), "v": (pairs, d_value)}

    def key_flops(self, config: ConfigFields, decoding: bool = False) -> int:
        return 2 * super().key_flops(config, decoding)

    def first_lambda(self, layer: int) -> float:
        return 0.8 - 0.6 * math.exp(-0.3 * layer) if self.lambda_init is None else self.lambda_init

    def describe(self, config: ConfigFields) -> str:
        heads = self.heads(config)
        sizes = [f"{heads.n_heads} pairs of heads of {heads.d_head}"]
        sizes += [f"{heads.n_kv_heads} for keys and values"] * (heads.n_kv_heads != heads.n_heads)
        return self.in_words(*sizes, shown=self.sizes)

    def check(self, config: ConfigFields) -> None:
        n_heads, n_kv_heads = self.n_heads or config.n_heads, self.n_kv_heads or config.n_kv_heads
        if n_kv_heads % 2 or n_heads % n_kv_heads:
            raise UserError(
                f"attention.differential has {n_heads} heads (n_heads) and {n_kv_heads} for keys (n_kv_heads): "
                "n_kv_heads must be even and divide n_heads"
            )
        if any(position.slopes is not None or isinstance(position, Alibi) for position in each(config.position)):
            raise UserError("attention.differential cannot have a slope per head: choose a position other than alibi")
