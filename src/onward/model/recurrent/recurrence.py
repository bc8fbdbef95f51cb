"""The recurrence of a state matrix that each token decays and adds to: step by step, or in chunks of tokens with the
same result.

For each head, with keys k and queries q of width E, values v of width F, decay a and a state S (E, F):

    S ← diag(a) S;  S ← S + k (v - β Sᵀk)ᵀ with v already multiplied by β, or S + k vᵀ without a β;  o = Sᵀq

With β this is the gated delta rule (Yang et al. 2024, arXiv:2412.06464), with one decay per key element Kimi Delta
Attention (arXiv:2510.26692), without β Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).

Shapes: B rows, T tokens, G key heads, R value heads that share a key head, E and F as above, C tokens of a chunk, N
chunks. In keys and queries, dimension R has size 1: the value heads share them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64  # tokens of a chunk
BLOCK = 16  # tokens of a block, in which decays per key element are computed for each pair of tokens


@dataclass(frozen=True, eq=False)
class Tokens:
    """The inputs of the recurrence for the tokens of a call, each (B, G, R or 1, T, ...)."""

    q: Tensor  # (B, G, 1, T, E)
    k: Tensor  # (B, G, 1, T, E)
    v: Tensor  # (B, G, R, T, F), multiplied by β or, in Mamba-2, by the step size
    decay: Tensor  # (B, G, R, T, 1 or E), the logarithm of a, at most 0
    beta: Tensor | None = None  # (B, G, R, T, 1); None: nothing is subtracted

    def each(self) -> dict[str, Tensor]:
        return {f.name: t for f in fields(self) if (t := getattr(self, f.name)) is not None}

    def at(self, columns: Tensor) -> Tokens:
        """Return the tokens at the indices `columns` (B, W)."""
        index = columns[:, None, None, :, None]
        return Tokens(**{n: t.gather(3, index.expand(*t.shape[:3], -1, t.size(4))) for n, t in self.each().items()})

    def only(self, real: Tensor) -> Tokens:
        """Return these tokens; a token where `real` (B, T) is False leaves the state as it is."""
        padding = ~real[:, None, None, :, None]
        changed = {n: t.masked_fill(padding, 0) for n, t in self.each().items() if n in ("v", "decay", "beta")}
        return Tokens(**self.each() | changed)


def steps(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the outputs (B, G, R, T, F) token by token, from the state (B, G, R, E, F) before the first one; also
    return the states after each of them, (B, T, G, R, E, F)."""
    outputs, states = [], []
    for t in range(tokens.v.size(3)):
        k, v = tokens.k[:, :, :, t, :, None], tokens.v[:, :, :, t, None]
        state = state * tokens.decay[:, :, :, t, :, None].exp()
        if tokens.beta is not None:
            v = v - tokens.beta[:, :, :, t, None] * (k.mT @ state)
        state = state + k * v
        outputs.append((tokens.q[:, :, :, t, None] @ state)[:, :, :, 0])
        states.append(state)
    return torch.stack(outputs, 3), torch.stack(states, 1)


def chunks(tokens: Tokens, state: Tensor, documents: Tensor | None = None, size: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Compute the outputs (B, G, R, T, F) in chunks of `size` tokens, from the state (B, G, R, E, F) before the first
    token; also return the state after the last one. `documents` (B, T) is the index of each token's packed document:
    each begins with a state of zeros, the first one with `state`."""
    length = tokens.v.size(3)
    size = min(size, length)
    padding = -length % size
    parts = {n: F.pad(t, (0, 0, 0, padding)).unflatten(3, (-1, size)) for n, t in tokens.each().items()}
    q, k, v, decay = (parts[name] for name in ("q", "k", "v", "decay"))  # each (B, G, R, N, C, ...)
    total = decay.cumsum(-2)
    inside = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    carried, kept, last = total.exp(), (total[..., -1:, :] - total).exp(), total[..., -1, :, None].exp()
    if documents is not None:
        ids = torch.cat([documents, documents[:, -1:].expand(-1, padding)], 1)
        ids = ids.unflatten(1, (-1, size))[:, None, None]  # (B, 1, 1, N, C)
        inside = inside & (ids[..., :, None] == ids[..., None, :])
        before = F.pad(ids[..., -1], (1, -1))  # index of the token before each chunk; 0: the given state
        continues = ids == before[..., None]
        carried, kept = carried * continues[..., None], kept * (ids == ids[..., -1:])[..., None]
        last = last * continues[..., -1, None, None]
    scores = decayed_products(q, k, total, inside)
    if "beta" in parts:
        beta = parts["beta"]
        system = beta * decayed_products(k, k, total, inside)  # the diagonal is not read
        solution = torch.cat([v, beta * carried * k], -1)
        solution = torch.linalg.solve_triangular(system, solution, upper=False, unitriangular=True)
        v, corrections = solution.split([v.size(-1), solution.size(-1) - v.size(-1)], -1)
    reading, writing = q * carried, (k * kept).mT
    outputs = []
    for n in range(v.size(3)):
        new = v[:, :, :, n]
        if "beta" in parts:
            new = new - corrections[:, :, :, n] @ state
        outputs.append(reading[:, :, :, n] @ state + scores[:, :, :, n] @ new)
        state = state * last[:, :, :, n] + writing[:, :, :, n] @ new
    return torch.stack(outputs, 3).flatten(3, 4)[:, :, :, :length], state


def decayed_products(q: Tensor, k: Tensor, total: Tensor, inside: Tensor) -> Tensor:
    """Return Σ_e q[i, e] k[j, e] exp(total[i, e] - total[j, e]) for the tokens i and j of each chunk, (..., C, C), and
    0 where `inside` is False. `total` (..., C, 1 or E) is the cumulative sum of the log-decays, which never increases
    from token to token; `exp` is never applied to a positive number."""
    if total.size(-1) == 1:
        return (q @ k.mT) * (total - total.mT).masked_fill(~inside, -torch.inf).exp()
    rows = []
    for start in range(0, q.size(-2), BLOCK):  # relative to the sum at the block's start, both factors are at most 1
        block = slice(start, start + BLOCK)
        sums = total[..., block, :]
        earlier = (q[..., block, :] * (sums - sums[..., :1, :]).exp()) @ (
            k[..., :start, :] * (sums[..., :1, :] - total[..., :start, :]).exp()
        ).mT
        among = torch.ones(sums.size(-2), sums.size(-2), dtype=torch.bool, device=q.device).tril()[..., None]
        pairs = (sums[..., :, None, :] - sums[..., None, :, :]).masked_fill(~among, -torch.inf).exp()
        own = torch.einsum("...ie,...je,...ije->...ij", q[..., block, :], k[..., block, :], pairs)
        rows.append(F.pad(torch.cat([earlier, own], -1), (0, q.size(-2) - start - sums.size(-2))))
    return torch.cat(rows, -2).masked_fill(~inside, 0)
