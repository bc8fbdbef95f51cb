"""Roles of attention heads (previous token, induction, ...) by their standard definitions, as scores from attention
weights.

Shapes: B texts, L layers, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from onward.base.errors import UserError
from onward.checkpoint.load import load_model
from onward.checkpoint.saves.folder import saves, step_of
from onward.inspection.inputs import as_row, attention_weights_of, exact
from onward.model.decoder import Decoder, without_dropout
from onward.tracing.trace import trace

DISTANCES = (1, 2, 3)  # distances to earlier tokens for the roles previous and back
MIN_SCORE = 0.3  # smallest score for which `map` names a role


@dataclass(frozen=True)
class HeadRoles:
    """The score of every attention head for each role, such as induction, as {role: scores (L, H)}: from 0 to 1, except
    for `rare` from -1 to 1. H is the greatest number of heads of a layer; layers with fewer heads are padded with
    -1."""

    scores: dict[str, Tensor]

    def map(self, least: float = MIN_SCORE) -> list[list[str]]:
        """Return the role with the greatest score for each head, as lists by layer and head; "" for a head without a
        score of at least `least`."""
        names, stacked = [*self.scores], torch.stack([*self.scores.values()])
        best = stacked.max(0)
        return [
            [names[i] if value >= least else "" for i, value in zip(row, values)]
            for row, values in zip(best.indices.tolist(), best.values.tolist())
        ]

    def strongest(self, role: str, count: int = 5) -> list[tuple[int, int, float]]:
        """Return the `count` heads with the greatest scores for a role, as (layer, head, score), the greatest first."""
        scores = self.scores[role]
        order = scores.flatten().argsort(descending=True)[:count].tolist()
        return [(*divmod(i, scores.size(1)), float(scores.flatten()[i])) for i in order]


def weights_of(model: Decoder, tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (layer, weights (B, H, T, T)); a layer without attention weights has no heads."""
    names = attention_weights_of(model)
    if not any(names):
        raise UserError("Cannot score heads, because no layer of this model has attention weights")
    with without_dropout(model), torch.no_grad(), trace(model, *(name for name in names if name)) as t:
        model.hidden(tokens.to(model.device))
    none = torch.zeros(len(tokens), 0, tokens.size(1), tokens.size(1), device=model.device)
    yield from enumerate([exact(t[name]) if name else none for name in names])


def mean_weight(weights: Tensor, offset: int, first: int = 0) -> Tensor:
    """Mean attention weight (H,) on the token `offset` positions before the query, over texts and queries from index
    `first` on; `weights` are (B, H, T, T)."""
    diagonal = weights.diagonal(-offset, 2, 3)  # entry i belongs to query i + offset
    return diagonal[..., max(0, first - offset) :].mean((0, 2)).cpu()


def repeated_tokens(model: Decoder, length: int = 0, texts: int = 4, seed: int = 0) -> Tensor:
    """Return random token ids (texts, 2 length), drawn with `seed`: each text repeats the same `length` tokens,
    distinct if the vocabulary is large enough. `length` is by default 50, or fewer if half the context or the
    vocabulary is smaller. Raises a UserError if the text does not fit into the context, or if `length` is 1."""
    c, generator = model.config, torch.Generator().manual_seed(seed)
    length = length or min(50, c.context_length // 2, c.vocab_size)
    if 2 * length > c.context_length or length < 2:
        if c.context_length < 4:
            raise UserError(f"Cannot repeat a text in a context of {c.context_length} tokens: at least 4 are needed")
        raise UserError(f"Cannot repeat {length} tokens: choose from 2 to {c.context_length // 2}, half of the context")
    rows = [torch.randperm(c.vocab_size, generator=generator)[:length] for _ in range(texts)]
    if length > c.vocab_size:
        rows = [torch.randint(c.vocab_size, (length,), generator=generator) for _ in range(texts)]
    half = torch.stack(rows)
    return torch.cat([half, half], 1)


def head_roles(
    model: Decoder,
    tokens: Sequence[int] | None = None,
    *,
    pairs: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    length: int = 0,
    seed: int = 0,
) -> HeadRoles:
    """Score every attention head for each role, such as induction, by its attention weights.

    On random tokens repeated once (the second half of `repeated_tokens` with this length and seed), as in Olsson et al.
    2022:

    previous     mean weight on the token before (`back 2`, `back 3`: 2 and 3 tokens before)
    self         mean weight on the token itself
    first        mean weight on the first token of the text (a sink)
    duplicate    mean weight on the same token in the first half
    induction    mean weight on the token after the same one in the first half

    On a text of `tokens`, if given:

    rare         mean over the tokens of attention weight times rarity, minus the same under uniform attention; rarity
                 is -log of a token's share of the text, divided by its greatest value
    NAME         for `pairs` {NAME: [(t, k), ...]}: mean weight of token t on token k
    """
    if pairs and tokens is None:
        raise UserError("Cannot score pairs without tokens: give both")
    ids = repeated_tokens(model, length, seed=seed)
    half = ids.size(1) // 2
    rows = dict[str, list[Tensor]]()
    for _, weights in weights_of(model, ids):
        layer = {"previous": mean_weight(weights, 1, half), "self": mean_weight(weights, 0, half)}
        layer |= {f"back {n}": mean_weight(weights, n, half) for n in DISTANCES[1:]}
        layer |= {"first": weights[:, :, half:, 0].mean((0, 2)).cpu()}
        layer |= {"duplicate": mean_weight(weights, half, half), "induction": mean_weight(weights, half - 1, half)}
        for name, score in layer.items():
            rows.setdefault(name, []).append(score)
    if tokens is not None:
        rarity = rarity_of(tokens)
        for _, weights in weights_of(model, as_row(model, tokens)):
            w = weights[0].cpu().to(rarity.dtype)
            uniform = rarity.cumsum(0) / torch.arange(1, len(tokens) + 1)
            rows.setdefault("rare", []).append(((w @ rarity) - uniform).mean(-1))
            for name, token_pairs in (pairs or {}).items():
                for t, k in token_pairs:
                    if not 0 <= k <= t < len(tokens):
                        raise UserError(
                            f"Cannot score the pair ({t}, {k}) of {name}: give (token, earlier token), "
                            f"from 0 to {len(tokens) - 1}"
                        )
                queries, keys = zip(*token_pairs)
                rows.setdefault(name, []).append(w[:, list(queries), list(keys)].mean(-1))
    return HeadRoles({name: pad_sequence(layers, True, -1.0) for name, layers in rows.items()})


def rarity_of(tokens: Sequence[int]) -> Tensor:
    """Rarity (T,) of each token: -log of its share of the text, divided by the greatest such value."""
    ids = torch.tensor(list(tokens))
    counts = (ids[:, None] == ids).sum(1)
    surprise = -(counts / len(ids)).log()
    return surprise / surprise.max().clamp(min=1e-9)


@dataclass(frozen=True)
class RoleCurve:
    """The scores of every head for one role in each checkpoint of a run."""

    role: str
    steps: list[int]
    scores: Tensor  # (checkpoints, L, H)


def role_curve(run: str | Path, role: str = "induction", length: int = 0) -> RoleCurve:
    """Compute the score of every head for a role of `head_roles` in each checkpoint of a run folder, to show when heads
    learn the role. `length` is the number of random tokens that are repeated, 0 for the default. Raises a UserError for
    a run without checkpoints; the run's option `keep` sets their number."""
    folders = saves(Path(run))
    if not folders:
        raise UserError(f"{run} has no checkpoints: name the folder of a run")
    scores = []
    for folder in folders:
        model, _ = load_model(folder, None, torch.device("cpu"))
        scores.append(head_roles(model, length=length).scores[role])
    return RoleCurve(role, [step_of(folder) for folder in folders], torch.stack(scores))
