"""The values that a recurrent layer carries from call to call and from token to token: the states of a cache, where
documents begin, and which columns are padding.

Shapes: B rows, T tokens in this call, W states that a call keeps, K taps of a convolution, X channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.model.context import AttentionContext
from onward.model.recurrent.recurrence import Tokens, chunks, steps
from onward.model.states import StateIndices, StateLayerCache, StateSlots


@dataclass(frozen=True, eq=False)
class Carried:
    """The states of one layer before and after one call of the model."""

    cache: StateLayerCache | None  # None: every row begins in this call
    call: StateIndices | None
    documents: Tensor | None  # (B, T), index of the packed document of each token; None: one document per row
    positions: Tensor  # (B or 1, T)
    suffix: str = ""  # added to state names from the layer's second call on: @1, @2, ...

    @staticmethod
    def of(context: AttentionContext) -> Carried:
        """Return the Carried of a layer's call. On a CPU without a cache, a row with branches raises a UserError."""
        segments, positions = context.mask.segments, context.mask.query_positions
        if isinstance(context.cache, StateLayerCache) and isinstance(context.indices, StateSlots):
            suffix = context.indices.numbered(context.cache, "")
            return Carried(context.cache, context.indices.states, None, positions, suffix)
        readable = positions.device.type == "cpu" and not torch.compiler.is_compiling()
        if segments is not None and readable and not torch.equal(segments.ids, segments.documents):
            raise UserError(
                "Cannot compute branches of a document in one row with recurrent layers, whose state is past the "
                "position where a branch begins: give each branch a separate row, with its document before it"
            )
        return Carried(None, None, None if segments is None else segments.documents, positions)

    @property
    def kept(self) -> int:
        return 0 if self.call is None else self.call.columns.size(1)

    def before(self, name: str, empty: Tensor) -> Tensor:
        """Return the state `name` before the call's first token, in the dtype and shape (B, ...) of `empty`, which
        contains zeros, the state of rows that begin in this call."""
        if self.cache is None or self.call is None:
            return empty
        return self.cache.before(name + self.suffix, self.call, empty)

    def keep(self, name: str, states: Tensor) -> None:
        """Keep the states after the tokens at `call.columns`, (B, W, ...)."""
        if self.cache is not None and self.call is not None:
            name += self.suffix
            self.cache.write(name, states.reshape(*states.shape[:2], *self.cache.states[name].shape[2:]), self.call)


def by_token(outputs: Tensor) -> Tensor:
    """Reorder outputs (B, G, R, T, F) to (B, T, H, F), where H = G R."""
    return outputs.movedim(3, 1).flatten(2, 3)


class Recurrence(nn.Module):
    """The recurrence of `recurrence.py` as a module, so that forward hooks can reach its outputs (B, T, H, F), in the
    order of value heads. Tokens are computed in chunks up to the first state to keep and one at a time after it, all
    one at a time if all states are kept. Hooks of `last` reach the state after the last column of the call, (B, H, E,
    F)."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Identity()

    def forward(self, tokens: Tokens, carried: Carried) -> Tensor:
        if (
            carried.cache is not None
            and (outputs := carried.cache.recur("state" + carried.suffix, **tokens.each())) is not None
        ):
            return by_token(outputs)
        shape = *tokens.v.shape[:3], tokens.k.size(-1), tokens.v.size(-1)  # (B, G, R, E, F)
        state = carried.before("state", tokens.v.new_zeros(shape))
        if carried.call is None:
            outputs, state = chunks(tokens, state, carried.documents)
        else:
            outputs, states = self.continued(tokens, state, carried.call, carried.kept)
            carried.keep("state", states)
            state = states[:, -1]
        self.last(state.flatten(1, 2))
        return by_token(outputs)

    def continued(self, tokens: Tokens, state: Tensor, call: StateIndices, kept: int) -> tuple[Tensor, Tensor]:
        """Compute the outputs (B, G, R, T, F) from the states before the first token, and the states after the last
        `kept` tokens of each row, (B, W, G, R, E, F)."""
        length = tokens.v.size(3)
        real = call.real(length)
        if real is not None:
            tokens = tokens.only(real)
        if length == kept:
            outputs, states = steps(tokens, state)
            return outputs, states if real is None else states[call.rows, call.columns.clamp(min=0)]
        first, later = call.columns[:, :1], call.columns[:, 1:]  # chunks up to the first state to keep, then steps
        columns = torch.arange(length, device=first.device)
        outputs, state = chunks(tokens.only(columns <= first) if later.size(1) else tokens, state)
        if not later.size(1):
            return outputs, state[:, None]
        tail, rest = steps(tokens.at(later.clamp(min=0)).only(later >= 0), state)
        index = (columns - first - 1)[:, None, None, :, None]
        tail = tail.gather(3, index.clamp(0, later.size(1) - 1).expand_as(outputs))
        return torch.where(index < 0, outputs, tail), torch.cat([state[:, None], rest], 1)


class Convolution(nn.Module):
    """The weights of a causal convolution of each channel over the last K tokens: `weight` (X, 1, K), with the newest
    token last, and perhaps `bias` (X)."""

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None


def convolve(x: Tensor, convolutions: list[Convolution], carried: Carried) -> Tensor:
    """Return x (B, T, X) after causal convolutions, side by side over the channels, which are reset at each document,
    in at least fp32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    weight = torch.cat([one.weight[:, 0] for one in convolutions]).to(exact)
    taps, length = weight.size(1), x.size(1)
    biases: list[Tensor] = [one.bias for one in convolutions if one.bias is not None]
    if carried.cache is not None and (y := carried.cache.convolve("conv" + carried.suffix, x, weight)) is not None:
        return y + torch.cat(biases) if biases else y
    inputs = torch.cat([carried.before("conv", x.new_zeros(len(x), taps - 1, x.size(2))), x], 1)
    if carried.call is not None:
        earlier = (carried.call.columns[..., None] + 1).clamp(min=0) + torch.arange(taps - 1, device=x.device)
        carried.keep("conv", inputs[carried.call.rows[..., None], earlier])
    y = torch.zeros_like(x, dtype=exact)
    for tap in range(taps):
        values = inputs[:, tap : tap + length] * weight[:, tap]
        if carried.documents is not None:
            values = values.masked_fill((carried.positions < taps - 1 - tap)[..., None], 0)
        y = y + values
    return y + torch.cat(biases) if biases else y
