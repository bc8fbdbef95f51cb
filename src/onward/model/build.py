"""Builds the modules of the parts of a DecoderConfig, and draws the initial values of the weights.

A part of your own with a method `build` builds its module itself; a subclass of one of Onward's parts without that
method builds the module of its base. Any other part raises a UserError. `further.py` builds the parts that a plain
Llama lacks. Shapes: B batch, T tokens in this call, D d_model.
"""

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from onward.base.fields import changed_fields
from onward.config import decoder as parts
from onward.config.decoder import DecoderConfig, at, each
from onward.model import blocks, further
from onward.model.attention import SelfAttentionModule
from onward.model.layers import GatedFeedForwardModule, NewNorm, PreNormModule, RMSNormModule

EXTENDED = {  # attention fields for steps that plain attention lacks
    *("value_scale", "value_norm", "values_are_keys", "qk_norm_part", "norm_rotated", "gate", "query_scale"),
}


def build_position(part: parts.Position, config: DecoderConfig, layer: int = 0) -> nn.Module | None:
    """Build the module that returns, for positions (B, T) and a dtype, the vectors (B, T, D) to add to the embeddings;
    None for parts that add none, such as Rotary."""
    if part.build is not None:
        return part.build(config, layer)
    return further.position(part, config) if part.added else None


def build_norm(part: parts.Norm, config: DecoderConfig, layer: int = 0, width: int = 0) -> nn.Module:
    """Build a norm over a last dimension of size `width` (0: d_model)."""
    if part.build is not None:
        return part.build(config, layer, width)
    match part:
        case parts.RMSNorm(weight=True):
            return RMSNormModule(width or config.d_model, part.eps, part.offset)
    return further.norm(part, width or config.d_model)


def build_attention(part: parts.Attention, config: DecoderConfig, layer: int = 0) -> nn.Module:
    """Build the attention module of a layer: from x (B, T, D) and an AttentionContext to (B, T, D)."""
    if part.build is not None:
        return part.build(config, layer)
    shares = any(other.shares_kv for other in each(config.attention))
    if isinstance(part, parts.SelfAttention) and not shares and EXTENDED.isdisjoint(changed_fields(part)):
        return SelfAttentionModule(part, config, layer_norms(config, layer))
    return further.attention(part, config, layer, build_norm, build_attention)


def build_mlp(part: parts.FeedForward, config: DecoderConfig, layer: int = 0) -> nn.Module:
    """Build the feed-forward module of a layer: from x (..., D) to (..., D)."""
    if part.build is not None:
        return part.build(config, layer)
    match part:
        case parts.Gated(combine=None):
            return GatedFeedForwardModule(config.d_model, part.width(config), part.act, part.bias, config.dropout)
    return further.feed_forward(part, config)


def build_block(part: parts.Block, config: DecoderConfig, layer: int = 0) -> nn.Module:
    """Build the block of a layer, with its attention and feed-forward: from x (B, T, D) and an AttentionContext to
    (B, T, D)."""
    if part.build is not None:
        return part.build(config, layer)
    match part:
        case parts.PreNorm(residual_scale=1.0, weights=None):
            return PreNormModule(*build_branches(config, layer))
        case parts.AttentionOnly():
            attn = build_attention(at(config.attention, layer), config, layer)
            return blocks.AttentionOnlyModule(attn, layer_norms(config, layer), blocks.weights_of(part, config, layer))
        case parts.FeedForwardOnly():
            mlp = build_mlp(at(config.mlp, layer), config, layer)
            return blocks.FeedForwardOnlyModule(mlp, layer_norms(config, layer), blocks.weights_of(part, config, layer))
        case parts.ScaledBlock():
            if module := blocks.module_of(part):
                return module(*build_branches(config, layer), blocks.weights_of(part, config, layer))
    raise further.no_module(part)


def build_branches(config: DecoderConfig, layer: int) -> tuple[nn.Module, nn.Module, NewNorm]:
    """Return the arguments of the constructor of a layer's block: attention, feed-forward, and a function that makes
    norms."""
    attn = build_attention(at(config.attention, layer), config, layer)
    return attn, build_mlp(at(config.mlp, layer), config, layer), layer_norms(config, layer)


def layer_norms(config: DecoderConfig, layer: int) -> NewNorm:
    """Return a function that makes the norms of layer number `layer`; its argument is the width, by default d_model."""
    return partial(build_norm, at(config.norm, layer), config, layer)


@torch.no_grad()
def initialize(model: nn.Module, config: DecoderConfig, std: float = 0.02) -> None:
    """Draw the weights of a decoder in place, from torch's default generator; does nothing on the meta device.

    | parameters                                        | values                                                    |
    | ------------------------------------------------- | --------------------------------------------------------- |
    | `attn.out`, `mlp.down` (the ends of branches)     | normal, std / sqrt(N), N additions to the residual stream |
    | every other matrix, embeddings, stacks of experts | normal, std                                               |
    | biases, sinks                                     | 0                                                         |
    | `lambda_` vectors of differential attention       | normal, 0.1                                               |
    | convolutions of recurrent layers                  | uniform, up to 1 / sqrt(taps)                             |
    | `a_log`, `dt_bias` (decays of recurrent layers)   | log of uniform 1 to 16; softplus of it is 0.001 to 0.1    |
    | norms                                             | unchanged: weights 1 - offset, biases 0                   |

    A block with attention and feed-forward adds 2 to N. The division keeps the variance of the residual stream from
    growing with depth (Radford et al. 2019, section 2.3).
    """
    if not next(model.parameters()).is_meta:
        draw(model.named_parameters(), config, std)


def draw(parameters: Iterable[tuple[str, Tensor]], config: DecoderConfig, std: float = 0.02) -> None:
    additions = sum(at(config.block, layer).additions for layer in range(config.n_layers))
    for name, parameter in parameters:
        if name.endswith(("_conv.weight", ".conv.weight")):
            bound = parameter.size(-1) ** -0.5
            nn.init.uniform_(parameter, -bound, bound)
        elif name.endswith(".a_log"):
            nn.init.uniform_(parameter, 1, 16).log_()
        elif name.endswith(".dt_bias"):  # the inverse of softplus at step sizes that are uniform on a log scale
            step = nn.init.uniform_(parameter, math.log(1e-3), math.log(0.1)).exp_()
            step.copy_(step + torch.log(-torch.expm1(-step)))
        elif ".lambda_" in name:
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim >= 2:
            ends_branch = name.removesuffix(".weight").endswith(("attn.out", "attention.out", "mamba.out", ".down"))
            nn.init.normal_(parameter, std=std / additions**0.5 if ends_branch else std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
