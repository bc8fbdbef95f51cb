"""Access to earlier tokens in parts of your own: vectors of earlier tokens (`previous`), and a state that each token
changes (`scan`).

Both read and write states of the cache, one for each call in a layer; the decoder's first forward pass finds these
states. They are reset at each packed document, and rows may be ragged, rolled back and snapshotted.

Shapes: B rows, T tokens in this call, W states that a call keeps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.model.context import AttentionContext
from onward.model.recurrent.carried import Carried


def carried_by(context: AttentionContext, x: Tensor) -> Carried:
    """Return the state that a part carries from token to token of x (B, T, ...). Raises a UserError if processes divide
    the tokens of a text, since each then has only some of them."""
    if x.size(1) != context.num_tokens:
        raise UserError(
            f"Cannot read earlier tokens in a text of {context.num_tokens}, of which this process has {x.size(1)}, "
            "because the axes context and tensor of a mesh divide tokens: use context=1 and tensor=1"
        )
    return Carried.of(context)


def previous(x: Tensor, context: AttentionContext, distance: int = 1) -> Tensor:
    """Return for each token the vector that the token `distance` positions before it has in x (B, T, ...), and zeros
    where its text or packed document has no such token. The cache keeps the last `distance` vectors of each row.

    >>> def forward(self, x, context):  # a token shift (RWKV, Peng et al. 2023, arXiv:2305.13048)
    ...     y = self.attn_norm(x)
    ...     return x + self.attn(y + self.mix * (previous(y, context) - y), context)
    """
    carried, length = carried_by(context, x), x.size(1)
    empty = x.new_zeros(len(x), distance, *x.shape[2:])
    inputs = torch.cat([carried.before("previous", empty), x], 1)
    if carried.call is not None:
        last = (carried.call.columns[..., None] + 1).clamp(min=0) + torch.arange(distance, device=x.device)
        carried.keep("previous", inputs[carried.call.rows[..., None], last])
    y = inputs[:, :length]
    if carried.documents is None:
        return y
    begins = carried.positions < distance
    return y.masked_fill(begins.view(*begins.shape, *[1] * (x.ndim - 2)), 0)


def scan(
    context: AttentionContext, step: Callable[..., tuple[Tensor, Tensor]], empty: Tensor, *inputs: Tensor
) -> Tensor:
    """Return the outputs (B, T, ...) of `step(state, *vectors)` -> (new state, output), which is called for one token
    after the other, with the vectors (B, ...) that the token has in `inputs`, each (B, T, ...). A text or packed
    document begins with the state `empty` (B, ...), zeros; the cache keeps the state of each row, in the dtype of
    `empty`.

    >>> def forward(self, x, context):  # adds the mean of the vectors so far
    ...     ones = x.new_ones(*x.shape[:2], 1)
    ...     step = lambda sums, new: (sums + new, (sums + new)[:, :-1] / (sums + new)[:, -1:])
    ...     return x + scan(context, step, x.new_zeros(len(x), x.size(2) + 1), torch.cat([x, ones], -1))
    """
    carried = carried_by(context, inputs[0])
    state, states, outputs = carried.before("scan", empty), [], []
    for t in range(inputs[0].size(1)):
        if carried.documents is not None:
            begins = (carried.positions[:, t] == 0).view(-1, *[1] * (empty.ndim - 1))
            state = torch.where(begins, empty, state)
        state, output = step(state, *(x[:, t] for x in inputs))
        states.append(state)
        outputs.append(output)
    if (call := carried.call) is not None:
        carried.keep("scan", torch.stack(states, 1)[call.rows, call.columns.clamp(min=0)])
    return torch.stack(outputs, 1)
