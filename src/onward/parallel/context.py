"""Context parallelism for an existing decoder: the processes of a context axis divide the tokens of each window. All
modules except attention compute only with the tokens of their process. In attention, the queries of these tokens attend
to the keys and values of all tokens, which the processes gather (Grattafiori et al. 2024, Llama 3, section 3.3.2).

A window is split into 2 n chunks, and process i has the chunks i and 2 n - 1 - i, so that with a causal mask all
processes compute the same number of scores.

Shapes: B windows, T tokens of each, n processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from onward.base.errors import UserError
from onward.model.attachments import attach
from onward.model.attention import Attend
from onward.model.cache import CacheView
from onward.model.context import AttentionContext
from onward.model.decoder import Decoder, check, check_tokens
from onward.model.layer_cache import Keys
from onward.parallel.functions import own_sum
from onward.parallel.masks import part
from onward.parallel.parts import all_gathered
from onward.parallel.tensor import TABLE


def own_tokens(x: Tensor, count: int, rank: int) -> Tensor:
    """The two chunks (B, T / n, ...) of process `rank`, joined."""
    chunks = x.split(x.size(1) // (2 * count), 1)
    return torch.cat([chunks[rank], chunks[-1 - rank]], 1)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `own_tokens`, given the parts of all processes by rank."""
    firsts, lasts = zip(*(part.split(part.size(1) // 2, 1) for part in parts))
    return torch.cat([*firsts, *reversed(lasts)], 1)


def own_batch(batch: Any, count: int, rank: int) -> Any:
    """Return the part of a batch that process `rank` of `count` trains on: the `tokens` and `targets` (B, T / n) of
    this process, and the `positions` of all tokens, (B, T), or (T,) if they are 0, 1, 2, ... in all rows. Each process
    gets a different seed for dropout."""
    if count == 1:
        return batch
    tokens, targets = (own_tokens(x, count, rank) for x in (batch.tokens, batch.targets))
    positions = torch.arange(batch.tokens.size(1), device=tokens.device) if batch.positions is None else batch.positions
    return replace(batch, tokens=tokens, targets=targets, positions=positions, seed=batch.seed + rank)


class GatherTokens(torch.autograd.Function):
    """The autograd function that joins the tokens `x` (B, T / n, ...) of all processes in the order of the window, (B,
    T, ...). The backward pass sums the gradients over the processes and returns the part for the tokens of this
    process."""

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
    """The inputs of one layer's attention in process `rank` of `count`. `rotation` is for the tokens of this process,
    `mask` is for all tokens, and `gather` joins the vectors of all processes."""

    rank: int = 0
    count: int = 1
    gather: Callable[[Tensor], Tensor] = lambda x: x

    @property
    def num_tokens(self) -> int:
        return super().num_tokens // self.count

    def update(self, **new: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.gather(vectors) for vectors in new.values())

    def parts(self) -> Iterator[tuple[int, AttentionContext]]:
        """Yield, for each of the two chunks of this process, the number of keys that its queries can attend to, and an
        AttentionContext with the mask of its queries over these keys."""
        size = self.num_tokens // 2
        for chunk in self.rank, 2 * self.count - 1 - self.rank:
            end = (chunk + 1) * size
            yield end, AttentionContext(part(self.mask, chunk * size, end))


class DividedTokens:
    """Changes a decoder in place so that `count` processes divide the tokens of its windows. This process has the rank
    `rank`; `gather` joins the vectors (B, T / n, ...) of all processes in the order of the window.

    A call of the decoder with fewer tokens than positions computes the tokens of this process. Other calls compute all
    tokens in each process, without communication. Raises a UserError for attention or feed-forward modules whose types
    are not in `tensor.TABLE`.
    """

    def __init__(self, model: Decoder, rank: int, count: int, gather: Callable[[Tensor], Tensor]) -> None:
        for layer, block in enumerate(model.blocks):
            for kind in "attn", "mlp":
                branch = block._modules.get(kind)
                if branch is not None and type(branch) not in TABLE:
                    name = f"blocks.{layer}.{kind}, a {type(branch).__name__},"
                    raise UserError(f"{name} has no rule for context parallelism: use context=1")
        self.model, self.rank, self.count, self.gather = model, rank, count, gather
        self.positions: Tensor | None = None  # positions of all tokens, in a call with the tokens of this process
        self.plain = False  # whether these positions are 0, 1, 2, ... in all rows
        attachment = attach(model, "context", f"{count} processes divide the tokens of each window")
        for method in self.hidden, self.hidden_of_checked, self.contexts:
            attachment.wrap(model, method.__name__, method)
        for module in model.modules():
            if isinstance(module, Attend):
                attachment.wrap(module, "forward", attend)

    @classmethod
    def of_group(cls, model: Decoder, group: distributed.ProcessGroup) -> DividedTokens:
        return cls(model, distributed.get_rank(group), group.size(), lambda x: GatherTokens.apply(x, group))

    def own(self, x: Tensor) -> Tensor:
        return own_tokens(x, self.count, self.rank)

    def hidden(self, plain: Any, tokens: Tensor, positions: Tensor | None = None, cache: Any = None) -> Tensor:
        """Compute `Decoder.hidden`, (B, T, D). Given the tokens (B, T / n) of this process and the positions of all
        tokens, (B, T) or (T,), compute the hidden states (B, T / n, D) of this process's tokens."""
        if positions is None or has_all_tokens(tokens, positions):
            return plain(tokens, positions, cache)  # type: ignore[no-any-return]
        check_tokens(tokens, self.model.config)
        check(self.model.config, positions.view(-1, length := positions.size(-1)), length, None)
        return self.model.hidden_of_checked(tokens, positions, None)

    def hidden_of_checked(self, plain: Any, tokens: Tensor, positions: Tensor | None, view: CacheView | None) -> Tensor:
        if positions is None or has_all_tokens(tokens, positions):
            return plain(tokens, positions, view)  # type: ignore[no-any-return]
        self.positions, self.plain = positions.view(-1, positions.size(-1)), positions.ndim == 1
        try:
            return plain(tokens, self.own(self.positions), None)  # type: ignore[no-any-return]
        finally:
            self.positions = None

    def contexts(
        self, undivided: Any, dtype: torch.dtype, positions: Tensor, view: CacheView | None, *, plain: bool
    ) -> list[AttentionContext]:
        if self.positions is None:
            return undivided(dtype, positions, view, plain=plain)  # type: ignore[no-any-return]
        rotations: dict[Any, Any] = {None: None}
        contexts: list[AttentionContext] = []
        for context in undivided(dtype, self.positions, None, plain=self.plain):
            rotation = context.rotation
            if rotation not in rotations:  # layers may share a rotation
                rotations[rotation] = tuple(map(self.own, rotation or ()))
            own: dict[str, Any] = {"rank": self.rank, "count": self.count, "gather": self.gather}
            contexts.append(DividedContext(context.mask, rotations[rotation], shared=context.shared, **own))
        return contexts


def has_all_tokens(tokens: Tensor, positions: Tensor) -> bool:
    return positions.size(-1) == tokens.size(1)


def attend(plain: Any, q: Tensor, k: Keys, v: Keys, context: AttentionContext) -> Tensor:
    """A layer around the `forward` of an Attend module. With a DividedContext, it calls the module once for each chunk
    of this process's queries, with the keys that the chunk can attend to."""
    if not isinstance(context, DividedContext):
        return plain(q, k, v, context)  # type: ignore[no-any-return]
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    chunks = zip(q.split(q.size(1) // 2, 1), context.parts())
    return torch.cat([plain(part, k[:, :end], v[:, :end], own) for part, (end, own) in chunks], 1)
