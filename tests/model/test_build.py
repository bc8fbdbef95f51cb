"""A user-defined part builds its module and computes positions with its own methods."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onward import (
    Alibi,
    Attention,
    Block,
    Decoder,
    DecoderConfig,
    Experts,
    FeedForward,
    LayerNorm,
    Learned,
    LinearScaling,
    Norm,
    Plain,
    Position,
    PreNorm,
    Rotary,
    Routing,
    Scaling,
    SelfAttention,
    SoftmaxRouting,
    UserError,
)
from onward.model import (
    AttentionContext,
    LayerNormModule,
    LearnedPositionModule,
    PlainFeedForwardModule,
    PreNormModule,
    SelfAttentionModule,
    SoftmaxRoutingModule,
    build_branches,
    layer_norms,
)
from onward.model.alibi import alibi_slopes
from onward.model.context import rotary

from support.decoders import config, decoder, token_ids


class HalfModule(PreNormModule):
    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.attn(self.attn_norm(x), context) * 0.5
        return x + self.mlp(self.mlp_norm(x)) * 0.5


@dataclass(frozen=True)
class OwnBlock(Block, kind="own_block", internal=True):
    def build(self, config: DecoderConfig, layer: int) -> HalfModule:
        return HalfModule(*build_branches(config, layer))


class FlatModule(SelfAttentionModule):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return q * 0.25, k, v


@dataclass(frozen=True)
class OwnAttention(SelfAttention, kind="own_attention", internal=True):
    def build(self, config: DecoderConfig, layer: int) -> FlatModule:
        return FlatModule(self, config, layer_norms(config, layer))


@dataclass(frozen=True)
class OwnMLP(FeedForward, kind="own_mlp", internal=True):
    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        return PlainFeedForwardModule(config.d_model, config.d_ff, "relu", False, 0.0)


@dataclass(frozen=True)
class OwnNorm(Norm, kind="own_norm", internal=True):
    def build(self, config: DecoderConfig, layer: int, width: int = 0) -> nn.Module:
        return LayerNormModule(width or config.d_model, 0.5)


@dataclass(frozen=True)
class OwnRouting(Routing, kind="own_routing", internal=True):
    def build(self, width: int, experts: int, top_k: int) -> nn.Module:
        return SoftmaxRoutingModule(self, width, experts, top_k, bias=True)


@dataclass(frozen=True)
class OwnExperts(Experts, kind="own_experts", internal=True):
    def combine(self, act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        return gate.relu() * up


@dataclass(frozen=True)
class OwnVectors(Position, kind="own_vectors", internal=True):
    added = True

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        return LearnedPositionModule(config.context_length, config.d_model, 3)


@dataclass(frozen=True)
class OwnRotation(Position, kind="own_rotation", internal=True):
    def rotation(self, width: int, positions: Tensor, rope_length: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(Rotary(theta=100), width, positions, rope_length)


@dataclass(frozen=True)
class OwnSlopes(Alibi, kind="own_slopes", internal=True):
    def slopes(self, config: DecoderConfig, device: torch.device) -> Tensor:
        return 2.0 ** -torch.arange(1, 5, device=device, dtype=torch.float64)


@dataclass(frozen=True)
class OwnBias(Position, kind="own_bias", internal=True):
    def slopes(self, config: DecoderConfig, device: torch.device) -> Tensor:
        return alibi_slopes(config.n_heads, 4.0).to(device)

    def score_bias(self, config: DecoderConfig, slope: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return slope.to(query) * (key - query)


@dataclass(frozen=True)
class OwnScaling(Scaling, kind="own_scaling", internal=True):
    def frequencies(self, plain: Tensor, theta: float, rope_length: Tensor) -> Tensor:
        return plain / 3


EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # user-defined parts, and equal parts of Onward
    "block": ({"block": OwnBlock()}, {"block": PreNorm(residual_scale=0.5)}),
    "attention": ({"attention": OwnAttention()}, {"attention": SelfAttention(scale=0.125)}),
    "feed-forward": ({"mlp": OwnMLP()}, {"mlp": Plain("relu")}),
    "norm": ({"norm": OwnNorm()}, {"norm": LayerNorm(0.5)}),
    "final norm": ({"final_norm": OwnNorm()}, {"final_norm": LayerNorm(0.5)}),
    "norm of queries and keys": (
        {"norm": OwnNorm(), "attention": SelfAttention(qk_norm="width")},
        {"norm": LayerNorm(0.5), "attention": SelfAttention(qk_norm="width")},
    ),
    "routing": (
        {"mlp": Experts(router=OwnRouting(), backend="loop")},
        {"mlp": Experts(router=SoftmaxRouting(bias=True), backend="loop")},
    ),
    "experts": ({"mlp": OwnExperts(backend="loop")}, {"mlp": Experts(act="relu", backend="loop")}),
    "vectors of positions": ({"position": OwnVectors()}, {"position": Learned(offset=3)}),
    "rotation": ({"position": OwnRotation()}, {"position": Rotary(theta=100)}),
    "slopes": ({"position": OwnSlopes()}, {"position": Alibi(steepness=4.0)}),
    "slopes and bias": ({"position": OwnBias()}, {"position": Alibi(steepness=4.0)}),
    "frequencies": ({"position": Rotary(scaling=OwnScaling())}, {"position": Rotary(scaling=LinearScaling(3.0))}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_own_part_equals_the_part_of_onward_that_it_repeats(name: str) -> None:
    own, ours = (config(d_ff=20, **parts) for parts in EQUAL[name])
    models = [decoder(c) for c in (own, ours)]
    assert [*models[0].state_dict()] == [*models[1].state_dict()]
    assert torch.equal(*(model(token_ids(ours)) for model in models))


class Bare:
    """Parts that lack required methods."""

    @dataclass(frozen=True)
    class OfAttention(Attention, kind="bare", internal=True): ...

    @dataclass(frozen=True)
    class OfFeedForward(FeedForward, kind="bare", internal=True): ...

    @dataclass(frozen=True)
    class OfNorm(Norm, kind="bare", internal=True): ...

    @dataclass(frozen=True)
    class OfBlock(Block, kind="bare", internal=True): ...

    @dataclass(frozen=True)
    class OfRouting(Routing, kind="bare", internal=True): ...

    @dataclass(frozen=True)
    class OfScaling(Scaling, kind="bare", internal=True): ...

    @dataclass(frozen=True)
    class OfVectors(Position, kind="bare", internal=True):
        added = True

    @dataclass(frozen=True)
    class OfSlopes(OwnBias, kind="bare_slopes", internal=True):
        score_bias = None


MISSING: dict[str, tuple[dict[str, Any], str]] = {
    "attention": (
        {"attention": Bare.OfAttention()},
        r"OfAttention, because .* build\(config, layer\)",
    ),
    "feed-forward": (
        {"mlp": Bare.OfFeedForward()},
        r"OfFeedForward, because .* build\(config, layer\)",
    ),
    "norm": ({"norm": Bare.OfNorm()}, r"OfNorm, because .* build\(config, layer, width\)"),
    "block": ({"block": Bare.OfBlock()}, r"OfBlock, because .* build\(config, layer\)"),
    "routing": (
        {"mlp": Experts(router=Bare.OfRouting())},
        r"OfRouting, because .* build\(width, experts, top_k\)",
    ),
    "vectors of positions": (
        {"position": Bare.OfVectors()},
        r"OfVectors, because .* build\(config, layer\)",
    ),
    "frequencies": (
        {"position": Rotary(scaling=Bare.OfScaling())},
        r"OfScaling has no frequencies: .* frequencies\(plain, theta",
    ),
    "bias": (
        {"position": Bare.OfSlopes()},
        r"OfSlopes has slopes but no bias: .* score_bias\(config, slope, query, key\)",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_part_without_a_method_it_needs_is_named_in_one_sentence(name: str) -> None:
    parts, sentence = MISSING[name]
    c = config(**parts)
    with pytest.raises(UserError, match=sentence) as error:
        Decoder(c)(token_ids(c))
    assert "\n" not in str(error.value)
