"""Context parallelism over a finished decoder: the processes of a context axis divide the tokens of each window. Every
module computes with the tokens of its process alone but for attention: queries of these tokens attend to the keys and
values of all tokens, which the processes gather (Grattafiori et al. 2024, Llama 3, section 3.3.2).

A window is cut into 2 n chunks, and process i has the chunks i and 2 n - 1 - i, so that with a causal mask all
processes compute equally many scores.

Shapes: B windows, T tokens of each, n processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from onward.errors import UserError
from onward.model.attention import Attend
from onward.model.cache import CacheView, Keys
from onward.model.context import AttentionContext
from onward.model.decoder import Decoder, check, check_tokens
from onward.parallel.functions import own_sum
from onward.parallel.parts import all_gathered
from onward.parallel.tensor import TABLE


def own_tokens(x: Tensor, count: int, rank: int) -> Tensor:
    """Return the two chunks (B, T / n, ...) that process `rank` of `count` has of a tensor (B, T, ...)."""
    chunks = x.split(x.size(1) // (2 * count), 1)
    return torch.cat([chunks[rank], chunks[-1 - rank]], 1)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor (B, T, ...) of which `own_tokens` made these parts (B, T / n, ...), by process."""
    firsts, lasts = zip(*(part.split(part.size(1) // 2, 1) for part in parts))
    return torch.cat([*firsts, *reversed(lasts)], 1)


def own_batch(batch: Any, count: int, rank: int) -> Any:
    """Return the part of a batch that process `rank` of `count` trains on: `tokens` and `targets` (B, T / n) of its
    tokens, but the `positions` of all, (B, T), or (T,) if they are 0, 1, 2, ... in all rows. Dropout is seeded
    differently in each process."""
    if count == 1:
        return batch
    tokens, targets = (own_tokens(x, count, rank) for x in (batch.tokens, batch.targets))
    positions = torch.arange(batch.tokens.size(1), device=tokens.device) if batch.positions is None else batch.positions
    return replace(batch, tokens=tokens, targets=targets, positions=positions, seed=batch.seed + rank)


class GatherTokens(torch.autograd.Function):
    """The autograd function that joins the tokens `x` (B, T / n, ...) of all processes in their order, (B, T, ...). In
    the backward gradients are summed over the processes, and each process keeps those of its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        return in_order(all_gathered(x, group.size(), group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        count = ctx.group.size()
        return own_sum([own_tokens(grad, count, rank) for rank in range(count)], ctx.group), None


@dataclass(frozen=True, eq=False)
class DividedContext(AttentionContext):
    """The inputs of one layer's attention in process `rank` of `count`. `rotation` is for this process's tokens, `mask`
    for all; `gather` joins the vectors of all processes."""

    rank: int = 0
    count: int = 1
    gather: Callable[[Tensor], Tensor] = lambda x: x

    @property
    def num_tokens(self) -> int:
        return super().num_tokens // self.count

    def update(self, **new: Tensor) -> tuple[Tensor, ...]:
        """Return the vectors (B, T, ...) of all tokens, given those of this process."""
        return tuple(self.gather(vectors) for vectors in new.values())

    def parts(self) -> Iterator[tuple[int, AttentionContext]]:
        """Yield, for the two chunks of this process, the number of keys that their queries can attend to, and an
        AttentionContext with their mask over these keys."""
        size = self.num_tokens // 2
        for chunk in self.rank, 2 * self.count - 1 - self.rank:
            end = (chunk + 1) * size
            yield end, AttentionContext(self.mask.part(chunk * size, end))


class DividedTokens:
    """The tokens of a decoder's windows, divided in place over `count` processes; this one is process `rank`, and
    `gather` joins the vectors (B, T / n, ...) of all processes in their order.

    A call of the decoder with fewer tokens than positions is one for the tokens of this process. Other calls compute
    all tokens in each process, without communication. Raises a UserError for attention or a feed-forward of another
    type than Onward's own.
    """

    def __init__(self, model: Decoder, rank: int, count: int, gather: Callable[[Tensor], Tensor]) -> None:
        for layer, block in enumerate(model.blocks):
            for kind in "attn", "mlp":
                branch = block._modules.get(kind)
                if branch is not None and type(branch) not in TABLE:
                    name = f"blocks.{layer}.{kind}, a {type(branch).__name__},"
                    raise UserError(f"{name} has no rule for context parallelism: use context=1")
        self.model, self.rank, self.count, self.gather = model, rank, count, gather
        self.positions: Tensor | None = None  # of all tokens, in a call for those of this process
        self.plain = False  # whether these positions are 0, 1, 2, ... in all rows
        self.of_all = model.hidden, model.hidden_of_checked, model.contexts
        changed: Any = model
        changed.hidden, changed.hidden_of_checked, changed.contexts = self.hidden, self.hidden_of_checked, self.contexts
        for module in model.modules():
            if isinstance(module, Attend):
                module.forward = partial(attend, module.forward)  # type: ignore[method-assign]

    @classmethod
    def of_group(cls, model: Decoder, group: distributed.ProcessGroup) -> DividedTokens:
        """Divide the tokens of a decoder over the processes of a group."""
        return cls(model, distributed.get_rank(group), group.size(), lambda x: GatherTokens.apply(x, group))

    def own(self, x: Tensor) -> Tensor:
        """Return the part of a tensor (B, T, ...) that belongs to the tokens of this process."""
        return own_tokens(x, self.count, self.rank)

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, cache: Any = None) -> Tensor:
        """Compute `Decoder.hidden` of all tokens or, given the tokens (B, T / n) of this process and the positions of
        all, (B, T) or (T,), of this process's tokens, (B, T / n, D)."""
        if positions is None or is_whole(tokens, positions):
            return self.of_all[0](tokens, positions, cache)
        check_tokens(tokens, self.model.config)
        check(self.model.config, positions.view(-1, length := positions.size(-1)), length, None)
        return self.model.hidden_of_checked(tokens, positions, None)

    def hidden_of_checked(self, tokens: Tensor, positions: Tensor | None, view: CacheView | None) -> Tensor:
        """Compute `hidden` without checking the arguments; see `Decoder.hidden_of_checked`."""
        compute = self.of_all[1]
        if positions is None or is_whole(tokens, positions):
            return compute(tokens, positions, view)
        self.positions, self.plain = positions.view(-1, positions.size(-1)), positions.ndim == 1
        try:
            return compute(tokens, self.own(self.positions), None)
        finally:
            self.positions = None

    def contexts(
        self, dtype: torch.dtype, positions: Tensor, view: CacheView | None, *, plain: bool
    ) -> list[AttentionContext]:
        """Return the contexts of all tokens or, in a call for the tokens of this process, those for these tokens."""
        if self.positions is None:
            return self.of_all[2](dtype, positions, view, plain=plain)
        rotations: dict[Any, Any] = {None: None}
        contexts: list[AttentionContext] = []
        for context in self.of_all[2](dtype, self.positions, None, plain=self.plain):
            rotation = context.rotation
            if rotation not in rotations:  # layers share them
                rotations[rotation] = tuple(map(self.own, rotation or ()))
            own: dict[str, Any] = {"rank": self.rank, "count": self.count, "gather": self.gather}
            contexts.append(DividedContext(context.mask, rotations[rotation], **own))
        return contexts


def is_whole(tokens: Tensor, positions: Tensor) -> bool:
    """Return whether a call has all tokens of its positions, not only those of a process."""
    return positions.size(-1) == tokens.size(1)


def attend(forward: Any, q: Tensor, k: Keys, v: Keys, context: AttentionContext) -> Tensor:
    """Call `forward`, that of a module Attend; with a DividedContext, for each chunk of this process's queries with the
    keys that they can attend to."""
    if not isinstance(context, DividedContext):
        return forward(q, k, v, context)  # type: ignore[no-any-return]
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    chunks = zip(q.split(q.size(1) // 2, 1), context.parts())
    return torch.cat([forward(part, k[:, :end], v[:, :end], its) for part, (end, its) in chunks], 1)
