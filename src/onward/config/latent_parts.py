"""Latent attention, a choice of `DecoderConfig.attention`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onward.base.errors import UserError
from onward.config.attention_options import Indexer, Indexing, OutputGate, QueryScale, SharedIndexer
from onward.config.part_types import Attention, ConfigFields, HeadSizes, at, each
from onward.config.ranges import Epsilon, Factor, Size, SizeOrZero


@dataclass(frozen=True)
class LatentAttention(Attention, kind="latent"):
    """Keys and values are projections of one latent vector per token; the cache keeps this vector and a rotary key
    shared by all heads (multi-head latent attention, DeepSeek-V2, DeepSeek-AI 2024, section 2.1)."""

    d_latent: Size = 512  # width of the latent of keys and values
    d_query_latent: SizeOrZero = 0  # width of the latent of queries; 0: queries are projected from x
    d_nope: Size = 128  # number of elements of each query and key that are not rotated
    d_rope: Size = 64  # number of rotated elements of each query and key; all heads share those of the key
    d_value: Size = 128  # width of each head's value
    scale: Factor | None = None  # multiplies the scores; none: (d_nope + d_rope) ** -0.5
    bias: bool = False  # whether the projections to the latents and the output projection have biases
    norm_eps: Epsilon = 1e-6  # epsilon of the norms of the latents
    n_heads: SizeOrZero = 0  # number of heads; 0: the config's n_heads
    gate: OutputGate | None = None  # multiplies the outputs of the heads; none: no gate
    query_scale: QueryScale | None = None  # multiplies the queries, by their position; none: no factor
    indexer: Indexing | None = None  # chooses the tokens that a token attends to; none: all of them

    sizes: ClassVar[tuple[str, ...]] = ("n_heads",)

    def heads(self, config: ConfigFields) -> HeadSizes:
        n_heads = self.n_heads or config.n_heads
        return HeadSizes(n_heads, n_heads, self.d_nope + self.d_rope, self.d_value)

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        entries: dict[str, tuple[int, ...]] = {"latent": (1, self.d_latent), "rotary": (1, self.d_rope)}
        if isinstance(self.indexer, Indexer):
            entries["index"] = 1, self.indexer.d_head
        return entries  # the keys of a single head, shared by all heads

    def describe(self, config: ConfigFields) -> str:
        heads = f"{self.heads(config).n_heads} heads of {self.d_nope} + {self.d_rope}"
        return self.in_words(heads, f"latents of {self.d_latent}", shown=("n_heads", "d_latent", "d_nope", "d_rope"))

    def rope_width(self, config: ConfigFields) -> int:
        return self.d_rope

    def key_flops(self, config: ConfigFields, decoding: bool = False) -> int:
        if decoding:  # latents serve as keys and values
            return 2 * self.heads(config).n_heads * (2 * self.d_latent + self.d_rope)
        return super().key_flops(config)

    def check(self, config: ConfigFields) -> None:
        if isinstance(self.indexer, Indexer):
            if not self.d_query_latent:
                raise UserError("attention.latent.indexer reads the latent of queries: give d_query_latent")
            if self.indexer.d_head < self.d_rope:
                raise UserError(
                    f"attention.latent.indexer.d_head {self.indexer.d_head} is less than the {self.d_rope} elements "
                    "that are rotated: change d_head or d_rope"
                )
        for layer in range(config.n_layers):
            index_source(config, layer)


def index_source(config: ConfigFields, layer: int) -> int:
    """Return the layer whose indexer selects the tokens of `layer`: itself or, if its indexer is shared, the nearest
    earlier layer with an indexer of its own."""
    part = at(config.attention, layer)
    if not isinstance(part, LatentAttention) or not isinstance(part.indexer, SharedIndexer):
        return layer
    for earlier in reversed(range(layer)):
        other = at(config.attention, earlier)
        if isinstance(other, LatentAttention) and isinstance(other.indexer, Indexer):
            return earlier
    raise UserError(
        f"attention.latent.indexer: layer {layer} shares an indexer, but no layer before it has one: give it its own"
    )


def most_keys(part: Attention, config: ConfigFields) -> int:
    """Return the greatest number of tokens that a token attends to, itself included; 0: no limit."""
    if not isinstance(part, LatentAttention) or not part.indexer:
        return part.window
    options = [other.indexer for other in each(config.attention) if isinstance(other, LatentAttention)]
    return max(option.top_k for option in options if isinstance(option, Indexer))


def index_flops(part: Attention) -> int:
    """Return the floating-point operations of an indexer for one pair of a token and an earlier token, to decide
    whether the token attends to the earlier one; 0 without an indexer."""
    indexer = part.indexer if isinstance(part, LatentAttention) else None
    return 2 * indexer.n_heads * (indexer.d_head + 1) if isinstance(indexer, Indexer) else 0
