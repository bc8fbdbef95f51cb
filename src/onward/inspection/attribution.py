"""Direct logit attribution: how much each layer, head and feed-forward adds to a logit; and attention rollout.

Shapes: L layers, H heads, T tokens, D d_model, E d_head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from onward.base.errors import UserError
from onward.config.decoder import NoAttention, at
from onward.inspection.inputs import as_row, attention_weights_of, check_position, exact
from onward.model.blocks import EQUAL, PostNormModule
from onward.model.decoder import Decoder, without_dropout
from onward.model.norms import LayerNormModule
from onward.tracing.listening import unheard
from onward.tracing.names import activation_names
from onward.tracing.trace import trace

# largest difference between the sum of the contributions and the logit, relative to the greatest of 1, the sum of their
# absolute values, and the norm of the hidden state times the norm of the direction
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class LogitAttribution:
    """The contributions of the model's parts to the logit of a token, or to the difference of two logits, after one
    position of a text. They sum to `logit` up to rounding."""

    tokens: list[int]
    position: int  # position at which the token is predicted
    target: int  # id of the token whose logit is attributed
    against: int | None  # id of the token whose logit is subtracted; None: no token
    logit: float  # logit before any scale or cap
    embedding: float  # contribution of the token's embedding and of the position, if positions are added
    heads: Tensor  # (L, H), padded with 0 to the largest number of heads; a layer without heads counts as one head
    attention_bias: Tensor  # (L,), contribution of the bias of the output projection
    mlps: Tensor  # (L,)
    constant: float  # contribution of the biases of the norms and of the output head


@torch.inference_mode(False)  # computes a gradient, which inference mode forbids
@torch.no_grad()
def logit_attribution(
    model: Decoder, tokens: Sequence[int], position: int = -1, target: int | None = None, against: int | None = None
) -> LogitAttribution:
    """Compute the contribution of each head, feed-forward and bias, and of the embedding, to the logit of the token id
    `target` (None: the likeliest token) that the model predicts after a position (negative: from the end). With
    `against`, another token id, the difference of the two logits is attributed.

    The residual stream is a sum. With the scales of the norms kept fixed, the logit is a sum too (Elhage et al. 2021);
    norms on the stream (post-norm) rescale all contributions before them. An effect through later layers counts as a
    contribution of those layers. Projections are computed by their modules, adapters included. Raises a UserError if
    the contributions do not sum to the logit.
    """
    row, position = as_row(model, tokens), check_position(position, tokens)
    with without_dropout(model):
        with trace(model, *names_of(model)) as t:
            hidden = model.hidden(row)
            logits = model.logits(hidden)
        target = int(logits[0, position].argmax()) if target is None else target
        for token in target, against:
            if token is not None and not 0 <= token < model.config.vocab_size:
                raise UserError(f"token id {token} is not in the vocabulary of {model.config.vocab_size} tokens")
        last = hidden[:, position, None]
        logit, direction = logit_and_direction(model, last, target, against)
    size = exact(last).norm() * direction.norm()
    constant = logit - float(exact(last)[0, 0] @ direction)  # contribution of the output head's bias
    at = lambda name: exact(t[name][0, position])
    modules = dict(model.named_modules())

    def before(name: str, direction: Tensor) -> Tensor:
        nonlocal constant
        norm = modules.get(name, nn.Identity())  # the identity if the block has no such norm
        constant += norm_constant(norm, direction)
        return direction if isinstance(norm, nn.Identity) else before_norm(norm, direction, at(f"{name}.scale"))

    direction = before("norm", direction)
    heads, biases, mlps = [], [], []
    for layer in reversed(range(model.config.n_layers)):  # from the end of the stream to its beginning
        name, block = f"blocks.{layer}", model.blocks[layer]
        (attn_kept, attn_scale), (mlp_kept, mlp_scale) = getattr(block, "weights", EQUAL)
        on_stream = isinstance(block, PostNormModule)
        direction = before(f"{name}.mlp_norm", direction) if on_stream else direction
        branch, direction = before(f"{name}.mlp_post_norm", direction * mlp_scale), direction * mlp_kept
        mlps.append(at(f"{name}.mlp.out") @ branch if f"{name}.mlp.out" in t else branch.new_zeros(()))
        direction = before(f"{name}.attn_norm", direction) if on_stream else direction
        branch, direction = before(f"{name}.attn_post_norm", direction * attn_scale), direction * attn_kept
        if f"{name}.attn.heads" in t:
            z = t[f"{name}.attn.heads"][:, position]
            by_head, bias = contributions_of_heads(modules[f"{name}.attn.out"], z[0], branch)
        elif f"{name}.attn.out" in t:  # a layer without heads, such as a short convolution, counts as one head
            by_head, bias = (at(f"{name}.attn.out") @ branch)[None], branch.new_zeros(())
        else:
            by_head, bias = branch.new_zeros(model.config.n_heads), branch.new_zeros(())
        heads.append(by_head)
        biases.append(bias)
    embedding = float(at("blocks.0.in") @ direction)
    padded = pad_sequence(heads[::-1], True).cpu()
    stacked = [padded, *(torch.stack(layers[::-1]).cpu() for layers in (biases, mlps))]
    total = embedding + constant + sum(float(x.sum()) for x in stacked)
    size = max(1.0, float(size), abs(embedding) + sum(float(x.abs().sum()) for x in stacked))
    if not abs(total - logit) <= TOLERANCE[model.dtype] * size:
        raise UserError(
            f"Cannot attribute the logit {logit:.6g}, because the contributions add up to {total:.6g}: an "
            "edit, a hook or a module of your own adds something other than heads, feed-forwards and "
            "embeddings to the residual stream"
        )
    return LogitAttribution(
        list(tokens), position, target, against, logit, embedding, stacked[0], stacked[1], stacked[2], constant
    )


def logit_and_direction(model: Decoder, hidden: Tensor, target: int, against: int | None) -> tuple[float, Tensor]:
    """The logit of `target`, minus that of `against`, before any scale and cap, and its gradient (D,) with respect to
    the hidden state (1, 1, D)."""
    with torch.enable_grad(), unheard():
        leaf = hidden.detach().requires_grad_()
        logits = model.head(model.embed_out(leaf))[0, 0]
        logit = exact(logits[target]) - (0.0 if against is None else exact(logits[against]))
        [direction] = torch.autograd.grad(logit, leaf)
    return float(logit), exact(direction[0, 0])


def contributions_of_heads(out: nn.Module, z: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Contributions (H,) of heads through the output projection `out`, and of its bias; `z` (H, E) are the outputs of
    heads, and `direction` (D,) is the gradient at the projection's output. The projection is called with one head at a
    time, the others set to 0, and once with all heads set to 0."""
    alone = torch.eye(len(z), dtype=z.dtype, device=z.device)[:, :, None] * z
    inputs = torch.cat([alone.flatten(1), torch.zeros_like(alone[:1]).flatten(1)])
    with unheard(), without_dropout(out):
        *heads, bias = exact(out(inputs[None])[0]) @ direction
    return torch.stack(heads) - bias, bias


def names_of(model: Decoder) -> list[str]:
    ends = "attn.heads", "attn.out", "mlp.out", "norm.scale"
    return [name for name in activation_names(model) if name == "blocks.0.in" or name.endswith(ends)]


def weight_of(norm: nn.Module) -> Tensor | float:
    """Weight (D,) by which a norm multiplies, its constant offset (such as 1 + weight) included."""
    weight: Any = norm.weight
    return 1.0 if weight is None else exact(weight) + getattr(norm, "offset", 0.0)


def before_norm(norm: nn.Module, direction: Tensor, scale: Tensor) -> Tensor:
    """Gradient d' at a norm's input x from `direction` (D,) at its output: d'·x = direction·norm(x). `scale`, by which
    the norm divides x, counts as a constant; the bias is left out."""
    direction = direction * weight_of(norm) / scale
    return direction - direction.mean() if isinstance(norm, LayerNormModule) else direction


def norm_constant(norm: nn.Module, direction: Tensor) -> float:
    bias: Any = getattr(norm, "bias", None)
    return 0.0 if bias is None else float(direction @ exact(bias))


@dataclass(frozen=True)
class Rollout:
    """How much of each token flows to each position through attention, from the input up to each layer."""

    tokens: list[int]
    flow: Tensor  # (L, T, T), query position t, key position k; rows sum to 1


@torch.no_grad()
def attention_rollout(model: Decoder, tokens: Sequence[int], residual: float = 0.5) -> Rollout:
    """Compute attention rollout of a text: the product of the attention weights of all layers up to each layer,
    averaged over heads and mixed with the identity, which represents the residual stream and has weight `residual`
    (Abnar and Zuidema 2020). A layer with only a feed-forward moves no information between tokens. Raises a UserError
    if another layer has no attention weights, such as a recurrent one."""
    names = attention_weights_of(model)
    for layer, name in enumerate(names):
        part = at(model.config.attention, layer)
        if name is None and not isinstance(part, NoAttention):
            raise UserError(
                f"Cannot follow attention through layer {layer}, because its part {part.kind} has no attention weights:"
                " inspect single layers instead, for example by attention_maps"
            )
    wanted = [name for name in names if name]
    with without_dropout(model), trace(model, "embed", *wanted, keep=lambda _, w: exact(w)[0].mean(0)) as t:
        model.hidden(as_row(model, tokens))
    identity = torch.eye(len(tokens), device=model.device)
    flow, result = identity, []
    for name in names:
        if name:
            weights = (1 - residual) * t[name] + residual * identity
            flow = weights / weights.sum(-1, keepdim=True) @ flow.to(weights)
        result.append(flow)
    return Rollout(list(tokens), torch.stack(result).cpu())
