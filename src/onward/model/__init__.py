"""Modules that custom parts build on, and changes to a finished model."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.model.activations import Activation, Child, Input, Output
    from onward.model.attention import SelfAttentionModule
    from onward.model.blocks import (
        AttentionOnlyModule,
        BranchNormModule,
        ParallelModule,
        PostNormModule,
        PreNormModule,
        SandwichModule,
        SharedNormModule,
    )
    from onward.model.build import build_attention, build_branches, build_mlp, build_norm, layer_norms
    from onward.model.context import AttentionContext
    from onward.model.experts import ExpertsModule, SigmoidRoutingModule, SoftmaxRoutingModule
    from onward.model.feedforward import GatedFeedForwardModule, PlainFeedForwardModule
    from onward.model.latent import LatentAttentionModule
    from onward.model.linear import Linear
    from onward.model.norms import LayerNormModule, RMSNormModule
    from onward.model.positions import LearnedPositionModule, SinusoidalPositionModule
    from onward.transforms.compiling import compile_blocks
    from onward.transforms.extend import extended
    from onward.transforms.heads import add_head
    from onward.transforms.quantize import quantize_model, quantize_rows
    from onward.transforms.recompute import recompute_blocks
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
    "GatedFeedForwardModule",
    "Input",
    "LatentAttentionModule",
    "LayerNormModule",
    "LearnedPositionModule",
    "Linear",
    "Output",
    "ParallelModule",
    "PlainFeedForwardModule",
    "PostNormModule",
    "PreNormModule",
    "RMSNormModule",
    "SandwichModule",
    "SelfAttentionModule",
    "SharedNormModule",
    "SigmoidRoutingModule",
    "SinusoidalPositionModule",
    "SoftmaxRoutingModule",
    "add_head",
    "build_attention",
    "build_branches",
    "build_mlp",
    "build_norm",
    "compile_blocks",
    "extended",
    "layer_norms",
    "quantize_model",
    "quantize_rows",
    "recompute_blocks",
]
