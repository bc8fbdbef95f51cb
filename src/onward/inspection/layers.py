"""Statistics of layers: the residual stream, units of the feed-forward, singular values, and the load of experts.

Shapes: L layers, B texts, T tokens, D d_model, F units, X experts, K texts kept per unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.inspection.inputs import as_row, exact
from onward.inspection.lens import residuals
from onward.model.decoder import Decoder, without_dropout
from onward.tracing.names import activation_names
from onward.tracing.trace import trace
from onward.transforms.lora import weights


@dataclass(frozen=True)
class ResidualStream:
    """The norm of each token's residual stream before the first block and after each block, and the cosine similarity
    of each of these vectors with the next one and with the last one."""

    tokens: list[int]
    norms: Tensor  # (L + 1, T)
    to_next: Tensor  # (L, T), cosine similarity of the stream and the stream after the next block
    to_last: Tensor  # (L + 1, T), cosine similarity of the stream and the stream after the last block


@torch.no_grad()
def residual_stream(model: Decoder, tokens: Sequence[int]) -> ResidualStream:
    """Compute the norm of each token's residual stream before the first block and after each block, and the cosine
    similarity of each of these vectors with the next one and with the last one."""
    streams = torch.cat([exact(x) for x in residuals(model, as_row(model, tokens))])
    cosine = torch.nn.functional.cosine_similarity
    to_next, to_last = cosine(streams[:-1], streams[1:], -1), cosine(streams, streams[-1:], -1)
    return ResidualStream(list(tokens), streams.norm(dim=-1).cpu(), to_next.cpu(), to_last.cpu())


@dataclass(frozen=True)
class Units:
    """The statistics of all units of one activation over many texts, such as feed-forward neurons or an autoencoder's
    features: how often each is active, and the tokens at which it is most active."""

    name: str  # name of the activation
    share: Tensor  # (F,), share of tokens for which the unit is active (above 0)
    peaks: Tensor  # (F, K), largest activations, at most one for each text
    texts: Tensor  # (F, K), the indices of these texts
    positions: Tensor  # (F, K), position of the token in its text

    @property
    def dead(self) -> list[int]:
        return (self.share == 0).nonzero()[:, 0].tolist()

    def most_active(self, count: int = 10) -> list[int]:
        """Return the indices of the `count` units with the greatest activations, the greatest first."""
        return self.peaks[:, 0].argsort(descending=True)[:count].tolist()


@torch.no_grad()
def units(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    name: str,
    *,
    top: int = 5,
    encode: Callable[[Tensor], Tensor] = lambda x: x,
) -> Units:
    """Measure how often and where each unit of an activation (B, T, F) called `name`, such as blocks.3.mlp.post, is
    active over texts of token ids, and find the `top` texts in which each unit is most active.

    `encode` turns the activation of a text (T, D) into features (T, F), such as those of a sparse autoencoder. Raises a
    UserError without texts, and for an activation of another shape.
    """
    if not texts:
        raise UserError("there are no texts: give at least one")
    top, peaks, positions, active, count = min(top, len(texts)), list[Tensor](), list[Tensor](), torch.zeros(()), 0
    for tokens in texts:
        with without_dropout(model), trace(model, name) as t:
            model.hidden(as_row(model, tokens))
        features = exact(encode(t[name][0])).cpu()
        if features.ndim != 2:
            raise UserError(
                f"Cannot measure units of {name}, which is {activation_names(model).get(name)}: name an "
                "activation (B, T, F)"
            )
        greatest = features.max(0)
        peaks.append(greatest.values)
        positions.append(greatest.indices)
        active, count = active + (features > 0).sum(0), count + len(features)
    best = torch.stack(peaks, 1).topk(top, dim=1)
    return Units(name, active / count, best.values, best.indices, torch.stack(positions, 1).gather(1, best.indices))


def singular_values(model: Decoder, pattern: str = "*") -> dict[str, Tensor]:
    """Compute the singular values, in descending order, of each weight matrix whose name matches `pattern`, where *
    matches any characters; adapters such as LoRA are included. Returns {name: singular values}; stacks of X experts
    have values (X, ...). Raises a UserError if no matrix matches."""
    targets, result = weights(model), dict[str, Tensor]()
    for name, p in model.named_parameters():
        if p.ndim >= 2 and fnmatchcase(name, pattern):
            target = targets.get(name.removesuffix(".weight"))
            matrix = target.adapters.weight(target.weight) if target and target.adapters else p
            result[name] = torch.linalg.svdvals(exact(matrix.detach())).cpu()
    if not result:
        raise UserError(f"no matrix of the model is named {pattern}: try 'blocks.0.*'")
    return result


@dataclass(frozen=True)
class RouterLoad:
    """How mixture-of-experts routers distribute tokens: the share of each expert among the choices of each router, by
    layer and by kind of token, such as number or word."""

    kinds: list[str]
    layers: list[int]  # indices of the layers with experts
    shares: Tensor  # (layers, kinds, X), share of each expert in the assignments of a kind; rows sum to 1


@torch.no_grad()
def router_load(model: Decoder, texts: Sequence[Sequence[int]], kind: Callable[[int], str]) -> RouterLoad:
    """Compute the share of each expert among the routers' choices in texts of token ids, by kind of token; `kind` maps
    a token id to the name of its kind. Raises a UserError for a model without experts."""
    names = [n for n in activation_names(model) if n.endswith("router.choices")]
    if not names:
        raise UserError("Cannot measure the load of routers, because this model has no experts")
    experts = max(int(activation_names(model)[n.replace("router.choices", "shares")].split()[-1][:-1]) for n in names)
    labels = {token: kind(token) for text in texts for token in text}
    kinds = sorted({*labels.values()})
    counts = torch.zeros(len(names), len(kinds), experts)
    for text in texts:
        with without_dropout(model), trace(model, *names) as t:
            model.hidden(as_row(model, text))
        row = torch.tensor([kinds.index(labels[token]) for token in text])
        for layer, name in enumerate(names):
            chosen = t[name][0].cpu()
            counts[layer].index_put_((row[:, None].expand_as(chosen), chosen), torch.ones(()), accumulate=True)
    layers = [int(name.split(".")[1]) for name in names]
    return RouterLoad(kinds, layers, counts / counts.sum(-1, keepdim=True).clamp(min=1))


def kind_of(piece: str) -> str:
    """Classify a token by its text `piece`, for `router_load`: space, number, word, capital (begins with a capital
    letter) or symbol."""
    text = piece.strip()
    if not text:
        return "space"
    if text.isdecimal():
        return "number"
    if text[0].isalpha():
        return "capital" if text[0].isupper() else "word"
    return "symbol"


@torch.no_grad()
def unit_activations(model: Decoder, tokens: Sequence[int], layer: int) -> Tensor:
    """Activations (T, F) of the hidden units of a layer's feed-forward."""
    name, known = f"blocks.{layer}.mlp.post", activation_names(model)
    if name not in known or f"blocks.{layer}.mlp.shares" in known:
        raise UserError(f"layer {layer} has no plain feed-forward: choose another --layer, or the view experts")
    with without_dropout(model), trace(model, name) as t:
        model.hidden(as_row(model, tokens))
    return t[name][0].float().cpu()


@torch.no_grad()
def expert_shares(model: Decoder, tokens: Sequence[int]) -> dict[int, Tensor]:
    """Weights (T, X) with which expert outputs are summed at each token, 0 for experts that are not chosen, by layer
    with experts."""
    names = [name for name in activation_names(model) if name.endswith("mlp.shares")]
    if not names:
        raise UserError("this model has no experts: choose another view")
    with without_dropout(model), trace(model, *names) as t:
        model.hidden(as_row(model, tokens))
    return {int(name.split(".")[1]): t[name][0].float().cpu() for name in names}
