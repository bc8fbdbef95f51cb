"""DecoderConfig: the sizes and the parts of a decoder. Does not import torch.

Every part can be imported from here. A part may be a tuple, which repeats over the layers:
`attention=(SelfAttention(window=128), SelfAttention())` alternates local and global layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onward.base.arguments import check_fields, named
from onward.base.errors import UserError
from onward.base.notebook import Shown
from onward.config.added_positions import *  # noqa: F403
from onward.config.attention_parts import *  # noqa: F403
from onward.config.attention_parts import SelfAttention
from onward.config.block_parts import *  # noqa: F403
from onward.config.block_parts import PreNorm, RMSNorm
from onward.config.differential_parts import *  # noqa: F403
from onward.config.feedforward_parts import *  # noqa: F403
from onward.config.feedforward_parts import XIELU, Gated, Plain
from onward.config.latent_parts import *  # noqa: F403
from onward.config.part_types import Attention, Block, FeedForward, Norm, P, Position, at, each
from onward.config.position_parts import *  # noqa: F403
from onward.config.position_parts import Rotary
from onward.config.ranges import Factor, Rate, Size, SizeOrZero
from onward.config.recurrent_parts import *  # noqa: F403
from onward.config.shared_keys import check_shared_keys


@named
@dataclass(frozen=True)
class DecoderConfig(Shown):
    """The configuration of a decoder-only Transformer as an immutable value: its sizes and its parts.

    A tuple of parts is repeated over the layers. Sizes that are 0 by default are computed from the others. The heads
    and the feed-forward of a layer have the sizes given here unless its parts have their own. Raises a UserError if
    sizes contradict each other.
    """

    vocab_size: Size  # number of token ids
    d_model: Size  # width of the residual stream
    n_layers: Size  # number of blocks
    n_heads: Size  # number of query heads
    n_kv_heads: SizeOrZero = 0  # number of key/value heads: 1 is multi-query; 0: n_heads
    d_head: SizeOrZero = 0  # width of a head; 0: d_model / n_heads
    d_ff: SizeOrZero = 0  # width inside the feed-forward; 0: 4 d_model; gated: next multiple of 32 from 8/3 d_model
    context_length: Size = 1024  # the longest sequence, in tokens
    position: Position | tuple[Position, ...] = Rotary()  # how position information enters the model
    attention: Attention | tuple[Attention, ...] = SelfAttention()  # how a token attends to earlier tokens
    mlp: FeedForward | tuple[FeedForward, ...] = Gated()  # the feed-forward, applied to each token by itself
    norm: Norm | tuple[Norm, ...] = RMSNorm()  # the norm of each branch
    block: Block | tuple[Block, ...] = PreNorm()  # the arithmetic of the residual stream
    final_norm: Norm | None = None  # the norm before the head; none: as in the blocks
    tied: bool = False  # the head uses the embedding's weights
    head_bias: bool = False  # whether the head has a bias
    d_embed: SizeOrZero = 0  # width of the embeddings, projected to d_model and back before the head; 0: d_model
    embed_norm: Norm | None = None  # the norm of the embeddings; none: no norm
    embed_scale: Factor = 1.0  # multiplies the embeddings
    logit_scale: Factor = 1.0  # multiplies the logits
    logit_softcap: Factor | None = None  # logits z become cap * tanh(z / cap)
    dropout: Rate = 0.0  # in training, of embeddings, attention weights, and outputs of attention and feed-forward

    def __post_init__(self) -> None:
        def derive(name: str, value: Callable[[], int]) -> None:
            object.__setattr__(self, name, getattr(self, name) or value())

        check_fields(self)
        names = "position", "attention", "mlp", "norm", "block"
        for name in names:
            if getattr(self, name) == ():
                raise UserError(f"{name} names no part: give at least one")
        if not self.d_head and self.d_model % self.n_heads:
            raise UserError(
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}: change one of them or give d_head"
            )
        derive("n_kv_heads", lambda: self.n_heads)
        derive("d_embed", lambda: self.d_model)
        derive("d_head", lambda: self.d_model // self.n_heads)
        gated = not isinstance(at(self.mlp, 0), Plain | XIELU)
        derive("d_ff", lambda: -(-8 * self.d_model // 96) * 32 if gated else 4 * self.d_model)
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}: change one")
        for name in names:  # equal decoders get equal fields
            parts = tuple(part.without_repeated_sizes(self) for part in each(getattr(self, name)))
            object.__setattr__(self, name, shortest(parts, self.n_layers))
        first = at(self.position, 0)
        if any(position.added and position != first for position in each(self.position)):
            raise UserError(
                "position: a part that is added to the embeddings (learned, sinusoidal) must be the first layer's"
            )
        for name in names:
            for part in each(getattr(self, name)):
                part.check(self)
        if any(part.shares_kv for part in each(self.attention)):
            check_shared_keys(self)


def shortest(parts: tuple[P, ...], n_layers: int) -> P | tuple[P, ...]:
    """Return the shortest tuple of parts that gives each of `n_layers` layers the same part as `parts` does, when both
    are repeated over the layers; a single part if all layers have the same."""
    seen = [at(parts, layer) for layer in range(min(n_layers, 2 * len(parts)))]
    period = next(p for p in range(1, len(seen) + 1) if all(a == b for a, b in zip(seen, seen[p:])))
    return seen[0] if period == 1 else tuple(seen[:period])
