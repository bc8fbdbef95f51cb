"""The modules of parts that a plain Llama does not have, for `build.py`.

Shapes: D d_model, N tokens, K experts per token (top_k).
"""

from collections.abc import Callable

from torch import nn

from onward.base.errors import UserError
from onward.base.fields import Part
from onward.config import decoder as parts
from onward.config import routing
from onward.config.decoder import DecoderConfig
from onward.model import extended, norms
from onward.model.differential import DifferentialAttentionModule
from onward.model.experts import (
    ExpertsModule,
    LatentExpertsModule,
    LogitBiasRoutingModule,
    SigmoidRoutingModule,
    SoftmaxRoutingModule,
)
from onward.model.feedforward import CombiningFeedForwardModule, XIELUFeedForwardModule
from onward.model.indexed import IndexedLatentAttentionModule
from onward.model.layers import NewNorm, PlainFeedForwardModule
from onward.model.positions import LearnedPositionModule, SinusoidalPositionModule
from onward.model.recurrent.layers import (
    AttentionAndMamba2Module,
    GatedDeltaNetModule,
    Mamba2Module,
    ScaledMamba2Module,
    ShortConvolutionModule,
)


def position(part: parts.Position, config: DecoderConfig) -> nn.Module:
    match part:
        case parts.Learned():
            return LearnedPositionModule(config.context_length, config.d_model, part.offset)
        case parts.Sinusoidal():
            return SinusoidalPositionModule(config.d_model, part)
    raise no_module(part)


def norm(part: parts.Norm, width: int) -> nn.Module:
    match part:
        case parts.LayerNorm(weight=True, offset=0.0):
            return norms.LayerNormModule(width, part.eps, bias=part.bias)
        case parts.LayerNorm():
            return norms.PartialLayerNormModule(width, part.eps, part.weight, part.bias, part.offset)
        case parts.RMSNorm():
            return norms.WeightlessRMSNormModule(width, part.eps)
        case parts.NoNorm():
            return nn.Identity()
    raise no_module(part, "config, layer, width")


def attention(
    part: parts.Attention,
    config: DecoderConfig,
    layer: int,
    build_norm: NewNorm,
    build_attention: Callable[[parts.Attention, DecoderConfig, int], nn.Module],
) -> nn.Module:
    """Build the attention module of a layer; `build_norm` makes norms from a part, the config, the layer and a width,
    `build_attention` the modules of inner parts."""
    match part:
        case parts.LatentAttention(indexer=indexer) if indexer:
            return extended.with_query_scale(part, IndexedLatentAttentionModule(part, config, layer))
        case parts.SelfAttention() | parts.LatentAttention():
            return extended.attention(part, config, layer, build_norm)
        case parts.DifferentialAttention():
            norm_of_pairs = build_norm(part.head_norm, config, layer, part.heads(config).d_value)
            return DifferentialAttentionModule(part, config, layer, norm_of_pairs)
        case parts.GatedDeltaNet():
            return GatedDeltaNetModule(part, config)
        case parts.AttentionAndMamba2():
            attn, mamba = (build_attention(one, config, layer) for one in (part.attention, part.mamba))
            return AttentionAndMamba2Module(attn, mamba, part.mamba_scale)
        case parts.Mamba2(scales=scales) if scales:
            return ScaledMamba2Module(part, config)
        case parts.Mamba2():
            return Mamba2Module(part, config)
        case parts.ShortConvolution():
            return ShortConvolutionModule(part, config)
    raise no_module(part)


def feed_forward(part: parts.FeedForward, config: DecoderConfig) -> nn.Module:
    sizes = config.d_model, part.width(config)
    match part:
        case parts.Plain():
            return PlainFeedForwardModule(*sizes, part.act, part.bias, config.dropout)
        case parts.Gated():
            return CombiningFeedForwardModule(part, *sizes, config.dropout)
        case parts.XIELU():
            return XIELUFeedForwardModule(*sizes, part.bias, config.dropout)
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


def no_module(part: Part, arguments: str = "config, layer") -> UserError:
    name = type(part).__name__
    return UserError(
        f"Cannot build the part {name}, because it has no module: give the class a method build({arguments}) that "
        "returns one"
    )
