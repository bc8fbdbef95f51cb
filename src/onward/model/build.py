"""Which module each part of a DecoderConfig builds, and the initial values of the weights.

A part of your own with a method `build` builds its module itself; a subclass of one of Onward's parts without that
method builds the module of its base. Any other part raises a UserError.
Shapes: B batch, T tokens in this call, D d_model, N tokens, K experts per token (top_k).
"""

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.base.fields import Part, changed_fields
from onward.config import decoder as parts
from onward.config import routing
from onward.config.decoder import DecoderConfig, at, each
from onward.model import blocks, extended, norms
from onward.model.attention import SelfAttentionModule
from onward.model.experts import (
    ExpertsModule,
    LatentExpertsModule,
    LogitBiasRoutingModule,
    SigmoidRoutingModule,
    SoftmaxRoutingModule,
)
from onward.model.feedforward import CombiningFeedForwardModule, XIELUFeedForwardModule
from onward.model.latent import LatentAttentionModule
from onward.model.layers import (
    GatedFeedForwardModule,
    NewNorm,
    PlainFeedForwardModule,
    PreNormModule,
    RMSNormModule,
)
from onward.model.positions import LearnedPositionModule, SinusoidalPositionModule
from onward.model.recurrent.layers import (
    AttentionAndMamba2Module,
    GatedDeltaNetModule,
    Mamba2Module,
    ScaledMamba2Module,
    ShortConvolutionModule,
)

EXTENDED = {  # fields of attention whose steps plain attention does not have
    *("value_scale", "value_norm", "values_are_keys", "qk_norm_part", "norm_rotated", "gate", "query_scale"),
}


def build_position(part: parts.Position, config: DecoderConfig, layer: int = 0) -> nn.Module | None:
    """Build the module from positions (B, T) and a dtype to vectors (B, T, D) that are added to the embeddings; None
    for parts that add none, such as Rotary."""
    if part.build is not None:
        return part.build(config, layer)
    match part:
        case parts.Learned():
            return LearnedPositionModule(config.context_length, config.d_model, part.offset)
        case parts.Sinusoidal():
            return SinusoidalPositionModule(config.d_model, part.theta)
    if part.added:
        raise no_module(part)
    return None


def build_norm(part: parts.Norm, config: DecoderConfig, layer: int = 0, width: int = 0) -> nn.Module:
    """Build a norm over a last dimension of size `width` (0: d_model)."""
    if part.build is not None:
        return part.build(config, layer, width)
    width = width or config.d_model
    match part:
        case parts.LayerNorm(weight=True, offset=0.0):
            return norms.LayerNormModule(width, part.eps, bias=part.bias)
        case parts.LayerNorm():
            return norms.PartialLayerNormModule(width, part.eps, part.weight, part.bias, part.offset)
        case parts.RMSNorm(weight=False):
            return norms.WeightlessRMSNormModule(width, part.eps)
        case parts.RMSNorm():
            return RMSNormModule(width, part.eps, part.offset)
        case parts.NoNorm():
            return nn.Identity()
    raise no_module(part, "config, layer, width")


def build_attention(part: parts.Attention, config: DecoderConfig, layer: int = 0) -> nn.Module:
    """Build the attention module of a layer: from x (B, T, D) and an AttentionContext to (B, T, D)."""
    if part.build is not None:
        return part.build(config, layer)
    match part:
        case parts.SelfAttention() | parts.LatentAttention() if is_extended(part, config):
            return extended.attention(part, config, layer, build_norm)
        case parts.SelfAttention():
            return SelfAttentionModule(part, config, layer_norms(config, layer))
        case parts.LatentAttention():
            return LatentAttentionModule(part, config)
        case parts.GatedDeltaNet():
            return GatedDeltaNetModule(part, config)
        case parts.AttentionAndMamba2():
            mixers = (build_attention(one, config, layer) for one in (part.attention, part.mamba))
            return AttentionAndMamba2Module(*mixers, part.mamba_scale)
        case parts.Mamba2(scales=scales) if scales:
            return ScaledMamba2Module(part, config)
        case parts.Mamba2():
            return Mamba2Module(part, config)
        case parts.ShortConvolution():
            return ShortConvolutionModule(part, config)
    raise no_module(part)


def is_extended(part: parts.Attention, config: DecoderConfig) -> bool:
    """Whether a layer may have steps beyond those of plain attention."""
    return not EXTENDED.isdisjoint(changed_fields(part)) or any(other.shares_kv for other in each(config.attention))


def build_mlp(part: parts.FeedForward, config: DecoderConfig, layer: int = 0) -> nn.Module:
    """Build the feed-forward module of a layer: from x (..., D) to (..., D)."""
    if part.build is not None:
        return part.build(config, layer)
    match part:
        case parts.Plain():
            return PlainFeedForwardModule(config.d_model, part.width(config), part.act, part.bias, config.dropout)
        case parts.Gated(combine=None):
            return GatedFeedForwardModule(config.d_model, part.width(config), part.act, part.bias, config.dropout)
        case parts.Gated():
            return CombiningFeedForwardModule(part, config.d_model, part.width(config), config.dropout)
        case parts.XIELU():
            return XIELUFeedForwardModule(config.d_model, part.width(config), part.bias, config.dropout)
        case parts.Experts(d_latent=width) if width:
            return LatentExpertsModule(part, config, build_router(part, config.d_model))
        case parts.Experts():
            return ExpertsModule(part, config, build_router(part, config.d_model))
    raise no_module(part)


def build_router(part: parts.Experts, width: int) -> nn.Module:
    """Build the router of a mixture of experts: from tokens (N, D), where D is `width`, to the weights and the ids of
    their experts, both (N, K)."""
    router, sizes = part.router, (width, part.count, part.top_k)
    if router.build is not None:
        return router.build(*sizes)
    match router:
        case routing.SoftmaxRouting():
            return SoftmaxRoutingModule(router, *sizes, router.bias)
        case routing.SigmoidRouting(bias_on="logits"):
            return LogitBiasRoutingModule(router, *sizes)
        case routing.SigmoidRouting():
            return SigmoidRoutingModule(router, *sizes)
    raise no_module(router, "width, experts, top_k")


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
    raise no_module(part)


def build_branches(config: DecoderConfig, layer: int) -> tuple[nn.Module, nn.Module, NewNorm]:
    """Return the arguments of the constructor of a layer's block: attention, feed-forward, and a function that makes
    norms."""
    attn = build_attention(at(config.attention, layer), config, layer)
    return attn, build_mlp(at(config.mlp, layer), config, layer), layer_norms(config, layer)


def layer_norms(config: DecoderConfig, layer: int) -> NewNorm:
    """Return a function that makes the norms of layer number `layer`; its argument is the width, by default d_model."""
    return partial(build_norm, at(config.norm, layer), config, layer)


def no_module(part: Part, arguments: str = "config, layer") -> UserError:
    name = type(part).__name__
    return UserError(
        f"Cannot build the part {name}, because it has no module: give the class a method build({arguments}) that "
        "returns one"
    )


@torch.no_grad()
def initialize(model: nn.Module, config: DecoderConfig, std: float = 0.02) -> None:
    """Draw the weights of a decoder in place, from torch's default generator; on the meta device there are none.

    | parameters                                        | values                                                    |
    | ------------------------------------------------- | --------------------------------------------------------- |
    | `attn.out`, `mlp.down` (the ends of branches)     | normal, std / sqrt(N), N additions to the residual stream |
    | every other matrix, embeddings, stacks of experts | normal, std                                               |
    | biases, sinks                                     | 0                                                         |
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
        elif parameter.ndim >= 2:
            ends_branch = name.removesuffix(".weight").endswith(("attn.out", "attention.out", "mamba.out", ".down"))
            nn.init.normal_(parameter, std=std / additions**0.5 if ends_branch else std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
