"""Direct logit attribution: how much each layer, head and feed-forward adds to a logit, and attention rollout.

Shapes: L layers, H heads, T tokens, D d_model, E d_head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onward.errors import UserError
from onward.inspection.inputs import as_row, check_position, exact
from onward.model.blocks import PostNormModule
from onward.model.decoder import Decoder, without_dropout
from onward.model.norms import LayerNormModule
from onward.tracing.trace import Trace, trace


@dataclass(frozen=True)
class LogitAttribution:
    """The parts of a logit, or of the difference of two, after one position of a text. They add up to `logit`."""

    tokens: list[int]
    position: int  # after which the token is predicted
    target: int  # the token id whose logit it is
    against: int | None  # the token id whose logit is subtracted
    logit: float  # before any scale or cap of the logits
    embedding: float  # of the token's embedding and, where they are added, the position
    heads: Tensor  # (L, H)
    attention_bias: Tensor  # (L,), of the bias of the output projection
    mlps: Tensor  # (L,)
    constant: float  # of the biases of norms and head


@torch.no_grad()
def logit_attribution(
    model: Decoder, tokens: Sequence[int], position: int = -1, target: int | None = None, against: int | None = None
) -> LogitAttribution:
    """What each part of a model adds to the logit of `target` (by default the likeliest token) after a position.

    The residual stream is a sum, and with the scales of the norms kept as they are (frozen), the logit is a sum too
    (Elhage et al. 2021). Parts that act through later layers count as those layers' own.
    """
    if any(isinstance(block, PostNormModule) for block in model.blocks):
        raise UserError("a model with norms on the residual stream (post-norm) has no direct parts of a logit")
    row, position = as_row(model, tokens), check_position(position, tokens)
    with without_dropout(model), trace(model, *names_of(model)) as t:
        logits = model(row)
    target = int(logits[0, position].argmax()) if target is None else target
    for token in target, against:
        if token is not None and not 0 <= token < model.config.vocab_size:
            raise UserError(f"token id {token} is not in the vocabulary of {model.config.vocab_size}")
    head: Any = model.head
    direction, constant = exact(head.weight[target]), 0.0 if head.bias is None else float(head.bias[target])
    if against is not None:
        direction = direction - exact(head.weight[against])
        constant -= 0.0 if head.bias is None else float(head.bias[against])
    if isinstance(model.embed_out, nn.Linear):
        direction = direction @ exact(model.embed_out.weight)
    constant += norm_constant(model.norm, direction)
    direction = before_norm(model.norm, direction, t, "norm", position)
    at = lambda name: exact(t[name][0, position])
    heads, biases, mlps = [], [], []
    for layer, block in enumerate(model.blocks):
        name, scale = f"blocks.{layer}", float(getattr(block, "scale", 1.0))
        to_attention = through_post_norm(block, "attn_post_norm", direction * scale, t, layer, position)
        constant_of_post = [norm_constant(block.get_submodule(n), direction * scale) for n in post_norms(block)]
        constant += sum(constant_of_post)
        z, out = at(f"{name}.attn.heads"), block.attn.out  # type: ignore[union-attr]
        if isinstance(out, nn.Identity):
            heads.append((z * to_attention.view_as(z)).sum(-1))
            biases.append(to_attention.new_zeros(()))
        else:
            back = (to_attention @ exact(out.weight)).view_as(z)  # type: ignore[union-attr, arg-type]
            heads.append((z * back).sum(-1))
            bias: Any = out.bias  # type: ignore[union-attr]
            biases.append(to_attention.new_zeros(()) if bias is None else to_attention @ exact(bias))
        if f"{name}.mlp.out" in t:
            to_mlp = through_post_norm(block, "mlp_post_norm", direction * scale, t, layer, position)
            mlps.append(at(f"{name}.mlp.out") @ to_mlp)
        else:
            mlps.append(direction.new_zeros(()))
    embedding = float(at("blocks.0.in") @ direction)
    found = [torch.stack(parts).cpu() for parts in (heads, biases, mlps)]
    total = embedding + constant + sum(float(part.sum()) for part in found)
    return LogitAttribution(
        list(tokens), position, target, against, total, embedding, found[0], found[1], found[2], constant
    )


def names_of(model: Decoder) -> list[str]:
    """The activations that an attribution needs."""
    from onward.tracing.names import activation_names

    ends = "attn.heads", "mlp.out", "post_norm.scale"
    return [n for n in activation_names(model) if n in ("blocks.0.in", "norm.scale") or n.endswith(ends)]


def post_norms(block: nn.Module) -> list[str]:
    """The names of the norms between a sub-layer and the residual stream."""
    return [name for name, _ in block.named_children() if name.endswith("post_norm")]


def through_post_norm(block: nn.Module, norm: str, direction: Tensor, t: Trace, layer: int, position: int) -> Tensor:
    """The direction before the norm of a sub-layer's output, where the block has one."""
    if norm not in post_norms(block):
        return direction
    return before_norm(block.get_submodule(norm), direction, t, f"blocks.{layer}.{norm}", position)


def weight_of(norm: nn.Module) -> Tensor | float:
    """The factors of a norm's output."""
    weight: Any = norm.weight
    return 1.0 if weight is None else exact(weight) + getattr(norm, "offset", 0.0)


def before_norm(norm: nn.Module, direction: Tensor, t: Trace, name: str, position: int) -> Tensor:
    """d' with d'·x = d·norm(x), for the norm with its scale at this position and without its bias."""
    if isinstance(norm, nn.Identity):
        return direction
    direction = direction * weight_of(norm) / exact(t[f"{name}.scale"][0, position])
    return direction - direction.mean() if isinstance(norm, LayerNormModule) else direction


def norm_constant(norm: nn.Module, direction: Tensor) -> float:
    """What the bias of a norm adds along a direction."""
    bias: Any = getattr(norm, "bias", None)
    return 0.0 if bias is None else float(direction @ exact(bias))


@dataclass(frozen=True)
class Rollout:
    """How much of each token flows to each position through attention, up to each layer."""

    tokens: list[int]
    flow: Tensor  # (L, T, T): row t, column k; rows sum to 1


@torch.no_grad()
def attention_rollout(model: Decoder, tokens: Sequence[int], residual: float = 0.5) -> Rollout:
    """The product of the layers' attention weights, averaged over heads, with a share `residual` of the residual stream
    (Abnar and Zuidema 2020)."""
    with without_dropout(model), trace(model, "blocks.*.attn.weights", keep=lambda _, w: exact(w)[0].mean(0)) as t:
        model.hidden(as_row(model, tokens))
    flow, result = torch.eye(len(tokens), device=model.device), []
    for layer in range(model.config.n_layers):
        weights = (1 - residual) * t[f"blocks.{layer}.attn.weights"] + residual * torch.eye(
            len(tokens), device=model.device
        )
        flow = weights / weights.sum(-1, keepdim=True) @ flow.to(weights)
        result.append(flow)
    return Rollout(list(tokens), torch.stack(result).cpu())
