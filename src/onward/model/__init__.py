"""Classes and functions that custom parts build on."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.model.activations import Activation, Child, Input, Output
    from onward.model.attention import SelfAttentionModule
    from onward.model.blocks import (
        AttentionOnlyModule,
        BranchNormModule,
        FeedForwardOnlyModule,
        ParallelModule,
        PostNormModule,
        SandwichModule,
        SharedNormModule,
    )
    from onward.model.build import build_attention, build_branches, build_mlp, build_norm, layer_norms
    from onward.model.context import AttentionContext
    from onward.model.experts import ExpertsModule, SigmoidRoutingModule, SoftmaxRoutingModule
    from onward.model.latent import LatentAttentionModule
    from onward.model.layers import (
        GatedFeedForwardModule,
        Linear,
        PlainFeedForwardModule,
        PreNormModule,
        RMSNormModule,
    )
    from onward.model.norms import LayerNormModule
    from onward.model.positions import LearnedPositionModule, SinusoidalPositionModule
    from onward.model.recurrent.earlier import previous, scan
    from onward.model.recurrent.layers import GatedDeltaNetModule, Mamba2Module, ShortConvolutionModule
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "Activation",
    "AttentionContext",
    "AttentionOnlyModule",
    "BranchNormModule",
    "Child",
    "ExpertsModule",
    "FeedForwardOnlyModule",
    "GatedDeltaNetModule",
    "GatedFeedForwardModule",
    "Input",
    "LatentAttentionModule",
    "LayerNormModule",
    "LearnedPositionModule",
    "Linear",
    "Mamba2Module",
    "Output",
    "ParallelModule",
    "PlainFeedForwardModule",
    "PostNormModule",
    "PreNormModule",
    "RMSNormModule",
    "SandwichModule",
    "SelfAttentionModule",
    "SharedNormModule",
    "ShortConvolutionModule",
    "SigmoidRoutingModule",
    "SinusoidalPositionModule",
    "SoftmaxRoutingModule",
    "build_attention",
    "build_branches",
    "build_mlp",
    "build_norm",
    "layer_norms",
    "previous",
    "scan",
]
